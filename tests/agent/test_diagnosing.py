"""Known mistakes around a loss scaler are named with their evidence; their twins raise nothing."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwatch.events import DiagnosisRaised, HookDisabled
from mpwatch_agent import setup_checks, verdicts
from mpwatch_agent.layers import grouped
from mpwatch_agent.verdicts import Findings
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "scaler_mistakes.py"

# case: (name, severity, words of the evidence)
MISTAKES = {
    "A1": ("scale_cannot_recover", "warning", "about every 40 steps, growth needs 2000"),
    "A2": ("forward_not_finite", "fault", "8 windows in a row since step 9"),
    "A3": ("optimizer_without_gradients", "fault", "Adam: 0 of 4 parameters have gradients"),
    "A4": ("weights_are_fp16", "fault", "4 of 4 trainable tensors are float16: 0.weight"),
    "A5": ("unscaled_twice", "fault", "at micro-batch 6 of the window, usually 4 long"),
    "A6": ("schedule_ahead_of_updates", "warning", "is 4 steps ahead of the updates"),
    "A7": ("scaler_not_restored", "warning", "at step 4, the scaler restarted at 65536"),
    "A8": ("clipped_before_unscale", "fault", "at scale 1024, true norm 0."),
    "A9": ("eps_vanishes_in_fp16", "warning", "eps 1e-08 of Adam underflows in float16"),
}


def diagnoses(forge: Forge, directory: Path, *arguments: str) -> tuple[list[DiagnosisRaised], str]:
    """(what was raised, stderr)"""
    with listening(directory) as listener:
        process = forge.run(SCRIPT, directory, *arguments, specification=specification(directory))
        listener.follow(process)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert not listener.of(HookDisabled)
    return listener.of(DiagnosisRaised), stderr.decode()


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, forge: Forge, case: str) -> None:
    name, severity, words = MISTAKES[case]
    raised, stderr = diagnoses(forge, tmp_path, case)
    names = [each.name for each in raised]
    assert set(names) == {name} | ({"update_not_finite"} if case == "A9" else set())
    found = [each for each in raised if each.name == name]
    assert found[-1].severity == severity
    assert words in found[-1].evidence
    assert found[-1].advice
    assert f"mpwatch: {severity}: {name}: {found[-1].evidence} (as of step " in stderr
    # Said once: a second time only in other words.
    assert len({each.evidence for each in found}) == len(found) <= 3


@pytest.mark.parametrize("case", MISTAKES)
def test_its_healthy_twin_is_left_alone(tmp_path: Path, forge: Forge, case: str) -> None:
    raised, stderr = diagnoses(forge, tmp_path, case, "healthy")
    assert raised == []
    assert "fault:" not in stderr
    assert "warning:" not in stderr


NO_ROOTS: Any = types.SimpleNamespace(modules=list)


def test_an_eps_that_its_format_can_hold_is_right() -> None:
    for dtype, eps in ((torch.float16, 1e-4), (torch.float32, 1e-8)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.Adam([weight], eps=eps)
        assert setup_checks.vanishing_eps(optimizer, NO_ROOTS) is None
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    said = setup_checks.vanishing_eps(torch.optim.Adam([weight], eps=5e-8), NO_ROOTS)
    assert said is not None
    assert "eps 5e-08 of Adam" in said.evidence


def test_verdicts_follow_their_evidence() -> None:
    steady = [1.0, 0.9, 0.95, 0.9, 0.85, 0.9, 0.88, 0.86]
    running_away = [1.0, 0.9, 0.95, 0.9, 0.85, 4.0, 9.0, 30.0]
    table = [
        (Findings(scale=1024.0, clean_windows=0, losses=steady), "scale_too_high"),
        (Findings(scale=1024.0, clean_windows=2, losses=steady), "scale_too_high"),
        (Findings(scale=1024.0, clean_windows=3, losses=steady), "bad_batch"),
        (Findings(scale=1024.0, clean_windows=99, losses=running_away), "diverging"),
        (Findings(losses=steady), "bad_batch"),
        (Findings(), "unknown"),
        (Findings(bad_loss=True), "forward"),
        (Findings(bad_loss=True, bad_batch="the batch"), "bad_batch"),
        (Findings(bad_loss=True, bad_weights="a weight"), "diverging"),
        (Findings(bad_loss=True, carried_over="left"), "carried_over"),
    ]
    for findings, verdict in table:
        assert verdicts.judge(findings).verdict == verdict
    assert "2.0 octaves below" in verdicts.judge(Findings(scale=2.0, largest=65504 / 4)).evidence


def test_layers_are_put_together_until_few_are_left() -> None:
    modules = [f"blocks.{block}.{part}" for block in range(60) for part in ("a", "b")]
    found = grouped(["head", *modules, "norm"])
    assert list(found) == ["head", "blocks", "norm"]
    assert found["blocks"] == list(range(1, 121))
    few = grouped(["a.b", "a.c", "a.b"])
    assert few == {"a.b": [0, 2], "a.c": [1]}
    flat = grouped([f"m{index}" for index in range(100)])
    assert len(flat) == 40
    assert sorted(each for positions in flat.values() for each in positions) == list(range(100))
