"""Known mistakes around a loss scaler are named with their evidence; their twins raise nothing."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwatch.events import DiagnosisRaised, HookDisabled, OverflowLocated
from mpwatch_agent import setup_checks, verdicts
from mpwatch_agent.agent import Agent
from mpwatch_agent.diagnoses import BrokenForward, ScheduleAhead, StepSeen
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.layers import grouped
from mpwatch_agent.verdicts import Findings
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "scaler_mistakes.py"
NARROW = SCRIPT.with_name("narrow_headroom.py")

# case: (name, severity, words of the evidence)
MISTAKES = {
    "A1": ("scale_cannot_recover", "warning", "about every 40 steps, growth needs 2000"),
    "A2": ("forward_not_finite", "fault", "8 windows in a row since step 9"),
    "A3": ("optimizer_without_gradients", "fault", "Adam: 0 of 4 parameters have gradients"),
    "A4": ("weights_are_fp16", "fault", "4 of 4 trainable tensors are float16: 0.weight"),
    "A5": (
        "unscaled_twice",
        "fault",
        "a second time with no scaler.update() in between, 6 micro-batches into a window that is"
        " usually 4 long; since the last update: unscale_, then unscale_, which torch refused",
    ),
    "A6": ("schedule_ahead_of_updates", "warning", "is 10 steps ahead of the updates"),
    "A7": ("scaler_not_restored", "warning", "at step 4, the scaler restarted at 65536"),
    "A8": ("clipped_before_unscale", "fault", "at scale 1024, true norm 0."),
    "A10": (
        "unscaled_twice",
        "fault",
        "after scaler.step(optimizer) with no scaler.update() in between; since the last update:"
        " unscale_, then scaler.step, then unscale_, which torch refused",
    ),
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


def skips(*numbers: int, scale: float = 65536.0, last: int = 60) -> list[str]:
    """What is said of a schedule that moves on at every step, where `numbers` are skipped."""
    rule, said, start = ScheduleAhead(), [], scale
    for number in range(1, last + 1):
        after = scale / 2 if number in numbers else scale
        found = rule.step(
            StepSeen(
                step=number,
                applied=number not in numbers,
                overflowed=number in numbers,
                bad_loss=False,
                scale_before=scale if start else None,
                scale_after=after if start else None,
                growth_interval=2000,
                learning_rates=(1.0 / number,),
            )
        )
        scale = after
        said += [found.evidence] if found is not None else []
    return said


def test_a_scale_that_starts_too_high_puts_no_schedule_ahead() -> None:
    # The scale of torch needs a dozen halvings here, one after another or nearly so.
    assert skips(*range(1, 13)) == []
    assert skips(1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15) == []
    # Three more in the course of a run do no harm.
    assert skips(*range(1, 13), 20, 30, 40) == []
    # Quiet steps are not told to the rule: what lies between counts all the same.
    (said,) = skips(*range(1, 7), 20, 30, 40, 50)
    assert said == (
        "the learning rate moved on after 4 steps that were skipped, with 6 more at the start,"
        " while the scale came down: the schedule is 10 steps ahead of the updates"
    )


def test_skips_that_no_scale_explains_put_a_schedule_ahead() -> None:
    # From 65536 the scale is 1 after 16 halvings; then it is not what starts too high.
    assert "after 4 steps that were skipped, with 16 more at" in skips(*range(1, 22))[0]
    # Without a scaler nothing comes down.
    assert "after 4 steps that were skipped: the" in skips(*range(1, 6), scale=0.0)[0]


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
        (Findings(scale=1024.0, clean_windows=3, losses=steady, largest=6e4), "bad_batch"),
        (
            Findings(scale=1.0, clean_windows=3, losses=steady, largest=6e4, micro_loss=0.9),
            "scale_too_high",
        ),
        (
            Findings(scale=1.0, clean_windows=3, losses=steady, largest=6e4, micro_loss=9.0),
            "bad_batch",
        ),
        (
            Findings(scale=1.0, clean_windows=3, losses=steady, largest=9e3, micro_loss=0.9),
            "bad_batch",
        ),
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


@pytest.mark.parametrize(
    ("case", "verdict", "but"),
    [
        (
            "drifted",
            "scale_too_high",
            ", but its loss is ordinary and the scale leaves little room",
        ),
        ("bad", "bad_batch", ""),
    ],
)
def test_little_room_and_an_ordinary_loss_speak_against_the_scale(
    tmp_path: Path, forge: Forge, case: str, verdict: str, but: str
) -> None:
    """The same headroom: only the loss tells an ordinary batch from a bad one."""
    with listening(tmp_path) as listener:
        process = forge.run(NARROW, tmp_path, case, specification=specification(tmp_path))
        while process.poll() is None:
            listener.drain(0.1)
        listener.drain(0.2)
    printed = process.communicate()[0].decode().split()
    *before, loss, scale = printed
    assert (before, scale) == ([before[0], "1024"] * 6, "512")
    (found,) = listener.of(OverflowLocated)
    assert (found.verdict, found.step) == (verdict, 7)
    assert found.evidence.startswith(
        f"6 windows before it were clean at scale 1024 or above{but};"
        f" its loss as passed to backward {loss}, typical {before[0]};"
    )
    # log2(65504 / (1024 * 40)): the other layer's gradient, which is finite.
    assert found.headroom_octaves == pytest.approx(0.6774, abs=1e-3)


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


@pytest.mark.parametrize("overflows", [1, 2, 6, 9])
def test_the_last_lines_have_the_first_overflow_and_the_newest(overflows: int) -> None:
    diagnoser = Agent(None).observing.diagnoser
    for step in range(1, overflows + 1):
        diagnoser.step_over(StepDraft(step, 1, [], 1), OverflowLocated(step=step, optimizer=1))
    first, *lines = diagnoser.last_lines()
    assert first == f"{overflows} overflow{'s' if overflows > 1 else ''} located:"
    steps = [line.strip().split(":")[0].split(",")[0] for line in lines]
    shown = [1, *range(max(2, overflows - 4), overflows + 1)]
    expected = [f"step {n}" for n in shown]
    if overflows > 6:
        expected.insert(1, f"... {overflows - 6} more ...")
    assert steps == expected


@pytest.mark.parametrize("applied", [True, False])
def test_a_broken_forward_says_what_became_of_the_weights(applied: bool) -> None:
    rule, said = BrokenForward(), []
    for step in range(5, 14):
        seen = StepSeen(
            step=step,
            applied=applied,
            overflowed=True,
            bad_loss=True,
            scale_before=None,
            scale_after=None,
            growth_interval=None,
            learning_rates=(0.1,),
            module="norm" if step == 5 else "",
        )
        said += [found] if (found := rule.step(seen)) is not None else []
    assert [each.evidence.split(" windows")[0][-1] for each in said] == ["3", "8"]
    diagnosis = said[-1]
    assert diagnosis.evidence == (
        "the forward makes values that are not finite, in 8 windows in a row since step 5,"
        " first in norm"
    )
    assert ("go back to a checkpoint" in diagnosis.advice) is applied
