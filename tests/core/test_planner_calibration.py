"""Calibration: what affine models make of tracked runs, checked by algebra on made-up peaks."""

import pytest

from mpwatch.planner.calibration import (
    Run,
    RunConfiguration,
    RunPhase,
    calibrate,
    wanted_runs,
)
from mpwatch.planner.footprint import Setup, binding_term, peak_moment
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import find_optimizer, find_precision

PARAMETERS = 1000
SPLITS = [(16, 1), (8, 2), (4, 4), (1, 16)]


def backward_peak(micro_batch: int, accumulation: int) -> int:
    """A convex truth: weights, carried gradients, and the larger of two affine parts."""
    carried = 4 * PARAMETERS if accumulation > 1 else 0
    return 4 * PARAMETERS + carried + max(5000 + 100 * micro_batch, 3000 + 900 * micro_batch)


def run_of(configuration: RunConfiguration) -> Run:
    """A run of plain SGD that reports the truth above."""
    b, n = configuration.micro_batch, configuration.accumulation_steps
    peak = backward_peak(b, n)
    gradients = 4 * PARAMETERS if n > 1 else 0
    owners = {"weights": 4 * PARAMETERS, "gradients": gradients, "logits": 10 * b}
    phases = (
        RunPhase(phase="forward", peak_bytes=peak - 1000, owners=owners),
        RunPhase(phase="backward", peak_bytes=peak, owners=owners),
        RunPhase(phase="optimizer", peak_bytes=8 * PARAMETERS, owners={}),
    )
    return Run(
        configuration=configuration,
        peak_bytes=peak,
        phases=phases,
        parameters=PARAMETERS,
        trained=PARAMETERS,
        buffer_bytes=0,
        largest=100,
    )


def estimate(runs: list[Run], micro_batch: int, accumulation: int, optimizer: str = "sgd") -> float:
    """Peak by the calibrated model."""
    setup = Setup(
        model=calibrate(runs, SPLITS),
        numerics=find_precision("O0"),
        optimizer=find_optimizer(optimizer),
    )
    steps = moments(setup, accumulating=accumulation > 1)
    return peak_moment(steps, micro_batch).bytes_at(micro_batch)


RUNS = [run_of(c) for c in wanted_runs(["O0"], SPLITS) if c.checkpointing == "none"]


def test_the_ends_of_every_kind_of_split_are_run() -> None:
    wanted = {(c.micro_batch, c.accumulation_steps) for c in wanted_runs(["O0"], SPLITS)}
    assert wanted == {(16, 1), (8, 2), (1, 2)}
    names = {c.precision for c in wanted_runs(["O0", "O2:bf16", "O3:bf16"], SPLITS)}
    assert names == {"O0", "O2:bf16"}


def test_exact_where_tracked_and_never_below_between() -> None:
    for b, n in ((16, 1), (8, 2), (1, 16)):
        assert estimate(RUNS, b, n) == pytest.approx(backward_peak(b, n))
    for b in (2, 3, 4, 5, 6, 7):
        assert estimate(RUNS, b, 2) >= backward_peak(b, 2) - 1e-6


def test_adam_adds_its_states_to_what_was_tracked_with_sgd() -> None:
    added = estimate(RUNS, 8, 2, "adamw-fused") - estimate(RUNS, 8, 2)
    assert added == pytest.approx(8 * PARAMETERS)


def test_logits_of_a_tracked_run_can_bind() -> None:
    heavy = []
    for run in RUNS:
        b = run.configuration.micro_batch
        phases = tuple(
            RunPhase(
                phase=phase.phase,
                peak_bytes=phase.peak_bytes + 100_000 * b,
                owners={**phase.owners, "logits": 100_000 * b},
            )
            for phase in run.phases
        )
        heavy.append(
            Run(
                configuration=run.configuration,
                peak_bytes=run.peak_bytes + 100_000 * b,
                phases=phases,
                parameters=PARAMETERS,
                trained=PARAMETERS,
                buffer_bytes=0,
                largest=100,
            )
        )
    setup = Setup(
        model=calibrate(heavy, SPLITS),
        numerics=find_precision("O0"),
        optimizer=find_optimizer("sgd"),
    )
    assert binding_term(moments(setup, accumulating=True), 8) == "logits"


def test_a_variant_that_was_cut_off_is_left_out() -> None:
    cut_off = [run for run in RUNS if run.configuration.micro_batch != 8]
    with pytest.raises(ValueError, match="both ends"):
        calibrate(cut_off, SPLITS)
