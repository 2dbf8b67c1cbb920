"""Predicted against measured peak memory, on CPU: python benchmarks/planner.py

Each line trains a small module for real, takes the peak from PyTorch's profiler, and compares what
the planner said beforehand: by tracking that very configuration on fake tensors, and by the model
calibrated from tracked runs at other micro-batches. A large GPT is tracked at the end. Exit code 1
when a prediction is off by more than the budget of 5 %, or the large one takes over 5 s or 500 MB.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mpwatch.cli.plan_tracking import Findings, Target, track
from mpwatch.planner.calibration import RunConfiguration, calibrate, wanted_runs
from mpwatch.planner.footprint import Setup, peak_moment
from mpwatch.planner.model import TrackedModel
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import find_optimizer, find_precision
from tests.support.large_gpt import BUDGET_KB, BUDGET_S
from tests.support.planner_cases import ARCHITECTURES, CONFIGURATIONS, fields, measured

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 0.05
SPLITS = [(16, 1), (8, 2), (4, 4), (1, 16)]
"""A batch of 16; the calibration runs only the ends: 16 for N = 1, and 8 and 1 for N > 1."""


def findings_of(name: str, configurations: list[RunConfiguration]) -> Findings:
    """Tracked runs of one architecture."""
    case = ARCHITECTURES[name]
    target = Target(
        model=case.model,
        input_shapes=case.shapes,
        input_dtypes=(case.dtype,) * len(case.shapes),
        loss=case.loss,
        timeout_s=600,
        cpu=True,
    )
    found = track(target, configurations)
    if found.cause or found.failures:
        raise SystemExit(f"{name}: {found.cause or found.failures}")
    return found


def calibrated(name: str) -> TrackedModel:
    """The planner's model of one architecture, from runs at the ends of the micro-batch."""
    variants = {(precision, kind) for precision, _, _, kind, _ in CONFIGURATIONS}
    variants |= {("O2:bf16", kind) for precision, kind in variants if precision == "O3:bf16"}
    wanted = wanted_runs(sorted({precision for precision, _ in variants}), SPLITS)
    found = findings_of(
        name, [run for run in wanted if (run.precision, run.checkpointing) in variants]
    )
    return calibrate(found.runs, SPLITS, flops_per_sample=found.flops_per_sample)


def estimated(model: TrackedModel, configuration: RunConfiguration) -> float:
    """Peak bytes by the calibrated model."""
    setup = Setup(
        model=model,
        numerics=find_precision(configuration.precision),
        optimizer=find_optimizer(configuration.optimizer),
        checkpointing=configuration.checkpointing,
    )
    steps = moments(setup, accumulating=configuration.accumulation_steps > 1)
    return peak_moment(steps, configuration.micro_batch).bytes_at(configuration.micro_batch)


def large_in_budget() -> bool:
    """Track a GPT of 1.4 billion parameters in a process of its own; processor time and memory."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.large_gpt"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    _, seconds, kilobytes = child.stdout.split()
    print(f"1.4 B parameters tracked in {float(seconds):.2f} s, {int(kilobytes) / 1e3:.0f} MB")
    return float(seconds) <= BUDGET_S and int(kilobytes) <= BUDGET_KB


def main() -> int:
    """Print one line per configuration and the worst error."""
    torch.set_num_threads(1)
    # Children find the packages and the toy modules of this checkout, installed or not.
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'agent'}"
    begin = time.monotonic()
    worst = {"tracked": 0.0, "estimated": 0.0}
    wanted = [RunConfiguration(**fields(configuration)) for configuration in CONFIGURATIONS]
    print(f"{'configuration':60} measured  tracked estimated")
    names = sys.argv[1:] or list(ARCHITECTURES)
    for name in names:
        exact = findings_of(name, wanted).runs
        model = calibrated(name)
        for configuration, request, run in zip(CONFIGURATIONS, wanted, exact, strict=True):
            truth = measured(name, configuration)
            errors = {
                "tracked": run.peak_bytes / truth - 1,
                "estimated": estimated(model, request) / truth - 1,
            }
            for kind, error in errors.items():
                worst[kind] = max(worst[kind], abs(error))
            print(
                f"{name:16} {configuration[0]:9} {configuration[1]:3} {configuration[2]:3}"
                f"  {configuration[3]:13} {configuration[4]:13} {truth / 1e6:6.2f} MB"
                f" {errors['tracked']:+8.2%} {errors['estimated']:+9.2%}",
                flush=True,
            )
    count = len(names) * len(CONFIGURATIONS)
    print(
        f"{count} configurations in {time.monotonic() - begin:.0f} s;"
        f" worst error: tracked {worst['tracked']:.2%}, estimated {worst['estimated']:.2%};"
        f" budget {BUDGET:.0%}"
    )
    return int(max(worst.values()) > BUDGET or not large_in_budget())


if __name__ == "__main__":
    sys.exit(main())
