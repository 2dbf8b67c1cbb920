"""Faults of accumulation by hand are named; their healthy twins stay silent."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mpwatch.events import DiagnosisRaised, HookDisabled
from mpwatch_agent import batch_statistics, window_rules
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "hand_windows.py"
STYLES = {
    "unequal": ("micro_batches_weighted_unequally", "warning", "token counts 2 to 5"),
    "partial": ("partial_windows_dropped", "warning", "4 micro-batches in 2 windows"),
    "cleared": ("gradients_cleared_inside_window", "fault", "only 1 of 4 micro-batches"),
    "clipped": ("clipped_inside_window", "warning", "after 4 of 4 micro-batches"),
    "schedule": (
        "schedule_stepped_per_micro_batch",
        "warning",
        "32 schedule steps, 8 optimizer steps; it ends at update 25 of 100",
    ),
    "sum": ("window_is_a_sum", "info", "added up undivided"),
}
HEALTHY = ("plain", "flushed", "clipped_once", "schedule_right", "thrown_away")


def test_each_fault_is_named_and_no_healthy_twin(tmp_path: Path, forge: Forge) -> None:
    told: dict[str, list[Any]] = {}
    for style in (*STYLES, *HEALTHY):
        directory = tmp_path / style
        directory.mkdir()
        with listening(directory) as listener:
            spec = specification(directory)
            run = forge.run(SCRIPT, directory, style, specification=spec)
            listener.follow(run)
        assert run.returncode == 0, run.communicate()[1].decode()
        assert not listener.of(HookDisabled), style
        told[style] = listener.of(DiagnosisRaised)
    for style, (name, severity, evidence) in STYLES.items():
        first = told[style][0]
        assert (first.name, first.severity) == (name, severity), style
        assert evidence in first.evidence
        assert {event.name for event in told[style]} == {name}
    assert [style for style in HEALTHY if told[style]] == []


ODD_WINDOWS = {
    # rule: (what is odd, what it is called)
    window_rules.UnequalTokens: ({"targets": (6, 3, 6, 6)}, "micro_batches_weighted_unequally"),
    window_rules.ClearedInside: (
        {"micro_batches": 1, "discarded": (1, 1, 1)},
        "gradients_cleared_inside_window",
    ),
    window_rules.ClippedOften: ({"clipped_at": (1, 2, 3, 4)}, "clipped_inside_window"),
    window_rules.SumNotMean: ({"divisor": None, "targets": (6, 6, 6, 6)}, "window_is_a_sum"),
}


@pytest.mark.parametrize("kind", ODD_WINDOWS)
def test_two_odd_windows_are_no_pattern(kind: Any) -> None:
    odd, name = ODD_WINDOWS[kind]
    usual = {"step": 1, "micro_batches": 4, "usual_window": 4, "divisor": 4.0}
    rule = kind()
    said = [rule.window(window_rules.WindowSeen(**{**usual, **odd})) for _ in range(3)]
    assert said[:2] == [None, None]
    assert said[2].name == name


def test_layers_with_batch_statistics_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    found = batch_statistics.named([model], 4)
    assert found is not None
    # 1 - 0.9 ** 4 of the way, where one big batch moves by a tenth.
    assert found.evidence.startswith("1 normalise over each micro-batch, not over the 4")
    assert "0.344 of the way instead of 0.1" in found.evidence
    assert batch_statistics.named([model], 1) is None
    assert batch_statistics.named([nn.Sequential(nn.GroupNorm(1, 2))], 4) is None
    assert batch_statistics.named([model.eval()], 4) is None


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.SyncBatchNorm(2)])
def test_every_kind_of_batch_norm_counts(layer: nn.Module) -> None:
    assert batch_statistics.batch_statistics([layer]) == [(type(layer).__name__, layer)]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (
            "told",
            {
                "batch_statistics_per_micro_batch",
                "fp16_loss_under_scaler",
                "gradients_edited",
                "schedule_too_long",
            },
        ),
        ("silent", set()),
    ],
)
def test_what_accumulation_says_once(
    tmp_path: Path, forge: Forge, mode: str, names: set[str]
) -> None:
    with listening(tmp_path) as listener:
        spec = specification(tmp_path, accumulate=4)
        run = forge.run(SCRIPT.with_name("noticed.py"), tmp_path, mode, specification=spec)
        listener.follow(run)
    assert run.returncode == 0, run.communicate()[1].decode()
    assert not listener.of(HookDisabled)
    said = [event.name for event in listener.of(DiagnosisRaised)]
    assert sorted(said) == sorted(names)
    assert [step.multiplier for step in listener.steps()] == [4, 4, 4]
