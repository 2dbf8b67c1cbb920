"""What the agent costs the training thread, in place: `python benchmarks/overhead.py`.

Each row is a process of its own with a real hub beside it. Hooks are switched on and off in random
blocks of steps within that process, so that the machine's drift falls on both alike. Printed: the
agent's own time against its budget (15 us per micro-batch + 50 us per step), what is only spent on
sampled steps and on flags of micro-batches beside it, the ratio of step times on/off with its 95 %
interval, and what a bare call of Python takes right after a step: the unit of all of it here.
"""

import argparse
import os
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
STEPS_PER_BLOCK = 50
SHAPES = ((1, 16), (2, 32), (2, 64), (4, 96), (6, 128), (6, 192), (6, 256), (6, 384), (6, 512))
SHAPES += ((6, 768), (6, 1024), (6, 1536), (6, 2048))


class Bench:
    """A small training loop: accumulation, GradScaler, clipping, as a user writes it."""

    def __init__(self, layers: int, width: int, micro_batches: int) -> None:
        torch.manual_seed(0)
        self._micro = micro_batches
        blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self._model = nn.Sequential(*blocks)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self._data = [torch.randn(32, width) for _ in range(8)]

    def step(self) -> float:
        """One step; returns its seconds."""
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


def nothing() -> None:
    """What a hook costs at least."""


def shape_for(step_s: float, micro_batches: int) -> tuple[int, int]:
    """The smallest model of the table whose step takes about `step_s` here."""
    for layers, width in SHAPES:
        bench = Bench(layers, width, micro_batches)
        if min(bench.step() for _ in range(5)) >= 0.8 * step_s:
            return layers, width
    return SHAPES[-1]


def measure(
    agent: Agent, bench: Bench, seconds: float, bare: list[float]
) -> tuple[list[float], list[float]]:
    """(medians of blocks with the agent on, with it off), pairwise; `bare` gets bare calls."""
    generator = random.Random(1)
    blocks: dict[bool, list[float]] = {True: [], False: []}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(blocks[True]) < 5:
        for on in generator.sample([True, False], 2):
            agent.gate.leave()
            agent.gate.open = on
            agent.loop.phases.restart(time.perf_counter())
            blocks[on].append(statistics.median(bench.step() for _ in range(STEPS_PER_BLOCK)))
            start = time.perf_counter()
            nothing()
            bare.append(time.perf_counter() - start)
    agent.gate.open = True
    return blocks[True], blocks[False]


def row(step_s: float, micro_batches: int, seconds: float, threads: int) -> None:
    """One row, in this process: prints it."""
    torch.set_num_threads(threads)
    directory = Path(tempfile.mkdtemp(prefix="mpwatch-bench-"))
    runtime = rendezvous.make_runtime_directory(directory)
    rendezvous.write_json(directory / rendezvous.RUN_FILE, {"run_id": "bench", "recorded": True})
    hub = subprocess.Popen([sys.executable, "-P", "-m", "mpwatch.hub_process", str(directory)])
    places = {"run_directory": str(directory), "runtime_directory": str(runtime)}
    agent = Agent({"run_id": "bench", "attempt": 1, "pythonpath": None, "settings": {}, **places})
    # First, as in a supervised script: classes of optimizers are seen when they are first used.
    agent.install()
    agent.gate.open = False
    layers, width = shape_for(step_s, micro_batches)
    agent.gate.open = True
    try:
        bench = Bench(layers, width, micro_batches)
        for _ in range(60):
            bench.step()
        drafts: list[StepDraft] = []
        keep, step = agent.reports.keep, agent.reports.step

        def kept(draft: StepDraft) -> None:
            keep(draft)
            drafts.append(draft)

        def stepped(draft: StepDraft, steps: int) -> None:
            step(draft, steps)
            drafts.append(draft)

        agent.reports.keep = kept  # type: ignore[method-assign]
        agent.reports.step = stepped  # type: ignore[method-assign]
        bare: list[float] = []
        on, off = measure(agent, bench, seconds, bare)
        flags = [(draft.locate_us or 0.0) * 1e-6 * micro_batches for draft in drafts]
        own = [d.agent_s - d.sampled_s - flag for d, flag in zip(drafts, flags, strict=True)]
        beside = {
            "sampled": [draft.sampled_s for draft in drafts],
            "flags": flags,
            "a bare call": bare,
        }
        report(micro_batches, on, off, own, beside)
    finally:
        agent.detach()
        hub.terminate()
        hub.wait()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)


def report(
    micro_batches: int,
    on: list[float],
    off: list[float],
    own: list[float],
    beside: dict[str, list[float]],
) -> None:
    """Print one row against the budgets."""
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    generator = random.Random(2)
    draws = (statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(1000))
    spread, ratio = sorted(draws), statistics.median(ratios)
    budget = (BUDGET_MICRO_S * micro_batches + BUDGET_STEP_S) * 1e6
    mean = statistics.mean(own) * 1e6
    print(
        f"{statistics.median(off) * 1e3:8.2f} ms  n={micro_batches}  own {mean:6.1f} us/step "
        f"(median {statistics.median(own) * 1e6:6.1f}; budget {budget:5.1f} "
        f"{'ok' if mean <= budget else 'OVER'})  "
        + "".join(f"{name} {statistics.mean(of) * 1e6:.1f}  " for name, of in beside.items())
        + f"on/off {ratio:.4f} [{spread[25]:.4f}, {spread[974]:.4f}] "
        f"{'ok' if ratio <= BUDGET_RATIO else 'OVER'}  ({len(ratios)} pairs)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", nargs=2, type=float, metavar=("STEP_S", "MICRO_BATCHES"))
    arguments = parser.parse_args()
    if arguments.row:
        step_s, micro_batches = arguments.row
        row(step_s, int(micro_batches), arguments.seconds, arguments.threads)
        return
    print(
        f"torch {torch.__version__}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    )
    for step_s in (0.001, 0.010, 0.100):
        for micro_batches in (1, 4):
            own = ["--seconds", str(arguments.seconds), "--threads", str(arguments.threads)]
            command = [sys.executable, __file__, *own, "--row", str(step_s), str(micro_batches)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
