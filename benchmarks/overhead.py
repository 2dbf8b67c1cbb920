"""What the agent costs the training thread, in place: `python benchmarks/overhead.py`.

One process, a real hub beside it. Hooks are switched on and off in random blocks of steps, so
that the machine's own drift falls on both alike. Printed per length of a step: the agent's own
time per micro-batch and per step against its budget (15 us per micro-batch + 50 us per step),
sampled measurements beside it, and the ratio of step times on/off with its 95 % interval.
"""

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from mpwatch import rendezvous
from mpwatch_agent.agent import Agent
from mpwatch_agent.drafts import StepDraft

BUDGET_MICRO_S, BUDGET_STEP_S, BUDGET_RATIO = 15e-6, 50e-6, 1.02


class Bench:
    """A small training loop whose micro-batch takes about `target_s`."""

    def __init__(self, agent: Agent, target_s: float, micro_batches: int) -> None:
        self._agent = agent
        self._micro = micro_batches
        width = self._width(target_s)
        torch.manual_seed(0)
        self._model = nn.Sequential(
            *[layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self._data = [torch.randn(32, width) for _ in range(8)]

    @staticmethod
    def _width(target_s: float) -> int:
        """The layer width whose forward and backward take about `target_s`."""
        for width in (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048):
            model = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
            data = torch.randn(32, width)
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                model(data).pow(2).mean().backward()
                best = min(best, time.perf_counter() - start)
            if best >= target_s * 0.8:
                return width
        return 2048

    def step(self) -> float:
        """One step as a user writes it; returns its seconds."""
        start = time.perf_counter()
        for index in range(self._micro):
            loss = self._model(self._data[index % 8]).pow(2).mean() / self._micro
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return time.perf_counter() - start


def measure(agent: Agent, step_s: float, micro_batches: int, seconds: float) -> None:
    """Print one row for steps of about `step_s`."""
    bench = Bench(agent, step_s / micro_batches, micro_batches)
    for _ in range(60):
        bench.step()
    taken: list[StepDraft] = []
    finished = agent.loop._finished
    agent.loop._finished = lambda draft: (finished(draft), taken.append(draft))[0]
    generator = random.Random(1)
    blocks: dict[bool, list[float]] = {True: [], False: []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for on in generator.sample([True, False], 2):
            agent.gate.open = on
            agent.loop.phases.restart(time.perf_counter())
            blocks[on].append(statistics.median(bench.step() for _ in range(20)))
    agent.gate.open = True
    agent.loop._finished = finished
    own = [(step.agent_s - step.sampled_s) for step in taken]
    report(step_s, micro_batches, blocks, own, [step.sampled_s for step in taken])


def report(
    step_s: float,
    micro_batches: int,
    blocks: dict[bool, list[float]],
    own: list[float],
    sampled: list[float],
) -> None:
    ratios = [on / off for on, off in zip(blocks[True], blocks[False], strict=True)]
    generator = random.Random(2)
    spread = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(1000)
    )
    budget = (BUDGET_MICRO_S * micro_batches + BUDGET_STEP_S) * 1e6
    mean = statistics.mean(own) * 1e6
    print(
        f"{statistics.median(blocks[False]) * 1e3:8.2f} ms  n={micro_batches}  "
        f"own {mean:7.1f} us/step (median {statistics.median(own) * 1e6:6.1f}, "
        f"budget {budget:5.1f}) {'ok  ' if mean <= budget else 'OVER'}  "
        f"sampled {statistics.mean(sampled) * 1e6:6.1f} us/step  "
        f"on/off {statistics.median(ratios):.4f} [{spread[25]:.4f}, {spread[974]:.4f}] "
        f"{'ok' if statistics.median(ratios) <= BUDGET_RATIO else 'OVER'}  "
        f"({len(ratios)} pairs of blocks)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per row")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    directory = Path(tempfile.mkdtemp(prefix="mpwatch-bench-"))
    runtime = rendezvous.make_runtime_directory(directory)
    rendezvous.write_json(
        directory / rendezvous.RUN_FILE, {"run_id": "bench", "name": "bench", "recorded": True}
    )
    hub = subprocess.Popen([sys.executable, "-P", "-m", "mpwatch.hub_process", str(directory)])
    agent = Agent(
        {
            "run_id": "bench",
            "attempt": 1,
            "run_directory": str(directory),
            "runtime_directory": str(runtime),
            "pythonpath": None,
            "settings": {},
        }
    )
    agent.install()
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
    try:
        for step_s in (0.001, 0.010, 0.100):
            for micro_batches in (1, 4):
                measure(agent, step_s, micro_batches, arguments.seconds)
    finally:
        agent.detach()
        hub.terminate()
        hub.wait()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)


if __name__ == "__main__":
    main()
