"""How fast a hub takes in steps, what a step weighs on disk, and whether its memory stays flat.

A real hub process behind a real socket writes a real record; the events vary like those of a real
run (float32 losses of four micro-batches, a norm every tenth step, times with jitter, an overflow
now and then, memory every fiftieth step). Run: `python benchmarks/ingest.py [--steps N]`.
"""

import argparse
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import zmq

from mpwatch import codec, rendezvous, wire
from mpwatch.client import LiveJob
from mpwatch.events import AgentBound, Event, PhaseMemory, StepFinished
from mpwatch.replayed import ReplayedJob

STEPS_PER_S_BUDGET = 10_000
BYTES_PER_STEP_BUDGET = 300
GROWTH_BUDGET = 0.05
BATCH = 100


def float32(value: float) -> float:
    """`value` as a script's loss comes: rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def realistic_step(step: int, dice: random.Random) -> StepFinished:
    """A step as the agent reports it for a small GPT on a GPU: n = 4, fp16."""
    losses = tuple(float32(2.0 + 3.0 * 0.9999**step + dice.gauss(0, 0.1)) for _ in range(4))
    scale = 65536.0 * 2.0 ** (step // 2000 % 4)
    overflow = dice.random() < 0.002
    phases = {
        "data": abs(dice.gauss(4e-4, 1e-4)),
        "forward": abs(dice.gauss(0.03, 2e-3)),
        "backward": abs(dice.gauss(0.06, 3e-3)),
        "optimizer": abs(dice.gauss(5e-3, 3e-4)),
        "other": abs(dice.gauss(1e-3, 2e-4)),
    }
    memory = {
        name: PhaseMemory(
            start_bytes=dice.randrange(10**9), end_bytes=dice.randrange(10**9), peak_bytes=2 * 10**9
        )
        for name in ("forward", "backward", "optimizer")
    }
    return StepFinished(
        step=step,
        applied=not overflow,
        micro_batches=4,
        script_window=4,
        overflow=overflow,
        losses=losses,
        loss_divisor=4.0,
        loss=sum(losses) / 4,
        loss_scale_before=scale,
        loss_scale_after=scale / 2 if overflow else scale,
        grad_norm=float32(abs(dice.gauss(1, 0.2))) if step % 10 == 0 else None,
        learning_rates=(3e-4 * min(1.0, step / 2000),),
        duration_s=sum(phases.values()),
        phase_s=phases,
        samples=32,
        tokens=32 * 128,
        memory=memory if step % 50 == 0 else None,
        agent_s=abs(dice.gauss(1e-4, 1e-5)),
        sampled_s=abs(dice.gauss(5e-5, 1e-5)) if step % 10 == 0 else 0.0,
    )


def batches(steps: int) -> Iterator[bytes]:
    """The payloads of an agent that made `steps` steps, encoded as they are taken."""
    dice = random.Random(1)
    sequence, frames = 0, []
    moment = time.time()
    events: list[Event] = [AgentBound(pid=os.getpid(), process_start_time=None)]
    for step in range(1, steps + 1):
        events.append(realistic_step(step, dice))
        for event in events:
            moment += dice.uniform(0.09, 0.11)
            frames.append(
                codec.encode_frame(
                    event, run="benchmark", attempt=1, rank=0, sequence=sequence, time=moment
                )
            )
            sequence += 1
        events = []
        if len(frames) >= BATCH or step == steps:
            yield codec.encode_batch(frames)
            frames = []


def start_hub(directory: Path) -> subprocess.Popen[bytes]:
    """A hub on a run whose keeper is this process."""
    me = os.getpid()
    keeper = {"pid": me, "start_time": rendezvous.process_start_time(me)}
    run = {"run_id": "benchmark", "keeper": keeper}
    rendezvous.write_json(directory / rendezvous.RUN_FILE, run)
    command = [sys.executable, "-P", "-m", "mpwatch.hub_process", str(directory)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def measure(steps: int, directory: Path) -> dict[str, float]:
    """Feed `steps` steps through; encoded beforehand, so that only the hub is measured."""
    prepared = list(batches(steps))
    runtime = rendezvous.make_runtime_directory(directory)
    hub = start_hub(directory)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = wire.agent_socket(context, rendezvous.agent_endpoint(runtime))
    job = LiveJob(directory, timeout_s=60.0)
    try:
        job.view()
        process = psutil.Process(hub.pid)
        resident = []
        cpu_before = sum(process.cpu_times()[:2])
        started = time.perf_counter()
        for index, payload in enumerate(prepared):
            socket.send_multipart(wire.message(wire.EVENTS, payload))
            if index % max(1, len(prepared) // 100) == 0:
                resident.append(process.memory_info().rss)
        while job.view().steps < steps:
            time.sleep(0.01)
        elapsed = time.perf_counter() - started
        cpu = sum(process.cpu_times()[:2]) - cpu_before
        resident.append(process.memory_info().rss)
    finally:
        job.close()
        socket.close(linger=0)
        context.term()
        hub.terminate()
        hub.wait(10)
        shutil.rmtree(runtime, ignore_errors=True)
    size = (directory / rendezvous.RECORD_FILE).stat().st_size
    return {
        "steps_per_s": steps / elapsed,
        "steps_per_cpu_s": steps / cpu,
        "bytes_per_step": size / steps,
        "resident_mb_halfway": resident[len(resident) // 2] / 1e6,
        "resident_mb_at_the_end": resident[-1] / 1e6,
        **first_paint(directory),
    }


def first_paint(directory: Path) -> dict[str, float]:
    """What a screen asks when it opens on this record."""
    started = time.perf_counter()
    with ReplayedJob(directory / rendezvous.RECORD_FILE) as job:
        job.view()
        points = job.steps(points=500).points
    return {"view_and_500_points_s": time.perf_counter() - started, "points": len(points)}


def main() -> int:
    """Measure, print against the budget; 1 where it is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400_000, help="10^6 for the budget's own size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpw-") as directory:
        found = measure(options.steps, Path(directory))
    growth = found["resident_mb_at_the_end"] / found["resident_mb_halfway"] - 1
    rows = [
        ("steps/s with record", found["steps_per_s"], f">= {STEPS_PER_S_BUDGET}"),
        ("steps per CPU second", found["steps_per_cpu_s"], ""),
        ("bytes per step on disk", found["bytes_per_step"], f"<= {BYTES_PER_STEP_BUDGET}"),
        ("hub resident halfway, MB", found["resident_mb_halfway"], ""),
        (
            "hub resident at the end, MB",
            found["resident_mb_at_the_end"],
            f"at most {GROWTH_BUDGET:.0%} more",
        ),
        ("open, view and 500 points, s", found["view_and_500_points_s"], "<= 1"),
    ]
    if options.json:
        print(json.dumps(found))
    else:
        for name, value, budget in rows:
            print(f"{name:32}{value:>12.3f}  {budget}")
    met = (
        found["steps_per_s"] >= STEPS_PER_S_BUDGET
        and found["bytes_per_step"] <= BYTES_PER_STEP_BUDGET
        and growth <= GROWTH_BUDGET
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
