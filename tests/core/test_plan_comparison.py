"""Predicted against measured: what is compared, what is not and why, whatever the plan holds."""

from typing import Any

import pytest

from mpwatch.cli.plan_comparison import (
    NOT_TENSORS,
    OTHER_BATCH,
    comparison,
    comparison_lines,
    whole_micro_batch,
)

PLAN = {
    "precision": "O1:bf16",
    "micro_batch": 4,
    "accumulation_steps": 8,
    "peak_bytes": 16_000_000,
    "phase_bytes": {"backward": 16_000_000, "optimizer": 9_000_000},
    "label": "tracked",
    "time_per_sample_s": 0.002,
}
SUMMARY: dict[str, Any] = {
    "run_id": "r1",
    "script_window": 2,
    "accumulation_steps": 2,
    "samples_per_s": 100.0,
    "memory_bytes": {
        "backward": {"start": 1, "peak": 32_000_000, "end": 1, "kind": "allocated"},
        "forward": {"start": 1, "peak": 200_000_000, "end": 1, "kind": "resident"},
        "optimizer": {"start": 1, "peak": 200_000_000, "end": 1, "kind": "resident"},
    },
    "phase_s": {"backward": {"median": 0.02, "total": 0.1}},
}


def test_a_difference_is_taken_only_of_two_things_of_a_kind() -> None:
    forward, backward, optimizer = comparison(PLAN, SUMMARY, 4).phases
    assert (forward.predicted_bytes, forward.predicted_label) == (None, "unknown")
    assert backward.difference == pytest.approx(-0.5)
    assert backward.predicted_label == "tracked"
    assert optimizer.difference is None
    assert optimizer.no_difference_because == NOT_TENSORS
    at_another_batch = comparison(PLAN, SUMMARY, 16).phases[1]
    assert at_another_batch.difference is None
    assert at_another_batch.no_difference_because == OTHER_BATCH


@pytest.mark.parametrize(
    ("planned", "window", "note"),
    [
        (2, 2, "as planned"),
        (8, 2, "not met: it would take K = 4 times the script's 2"),
        (7, 2, "not met: no multiple of the script's 2"),
        (8, None, "unknown"),
    ],
)
def test_accumulation_is_a_multiple_of_the_scripts_window(
    planned: int, window: int | None, note: str
) -> None:
    summary = {**SUMMARY, "script_window": window, "accumulation_steps": window}
    assert comparison({**PLAN, "accumulation_steps": planned}, summary).fields[0].note == note


def test_lines_for_people() -> None:
    lines = comparison_lines(comparison(PLAN, SUMMARY, 4))
    assert lines == [
        "run r1: predicted against measured",
        "accumulation_steps planned 8, the script's 2: not met: it would take K = 4 times the"
        " script's 2",
        "micro_batch planned 4, the script's 4: as planned",
        "planned and not seen in a run: precision O1:bf16",
        "forward   predicted unknown, measured 200 MB [resident], time unknown",
        "backward  predicted 16.0 MB (tracked), measured 32.0 MB [allocated] (-50.0%),"
        " 20 ms measured",
        "optimizer predicted 9.00 MB (tracked), measured 200 MB [resident] (no difference is"
        " taken: interpreter and libraries included), time unknown",
        "per sample predicted 2 ms (estimated, for the planned device), measured 10 ms here",
    ]


@pytest.mark.parametrize("value", ["four", -1, 0, 1.5, True, [], {}, None, 10**400, float("nan")])
def test_a_plan_that_somebody_edited(value: Any) -> None:
    plan = dict.fromkeys([*PLAN, "sharding"], value)
    found = comparison(plan, SUMMARY, 4)
    assert all(phase.difference is None for phase in found.phases)
    assert all("\n" not in line for line in comparison_lines(found))


def test_a_run_of_which_nothing_is_known() -> None:
    summary = dict.fromkeys(SUMMARY)
    assert all("unknown" in line for line in comparison_lines(comparison(PLAN, summary))[4:7])


def test_micro_batch_of_equal_parts_only() -> None:
    assert whole_micro_batch(16, 4) == 4
    assert whole_micro_batch(17, 4) is None
    assert whole_micro_batch(None, 4) is None
