"""Steps that are only noted are told as they were: the script's own account is the oracle."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from mpwatch.commands import SetSampling, StopAtBoundary
from mpwatch.events import (
    CommandApplied,
    HookDisabled,
    OverflowLocated,
    StepFinished,
    WindowDiscarded,
)
from mpwatch_agent.phases import PhaseClock
from tests.agent.test_boundary import ask
from tests.support.agent_runs import listening, specification
from tests.support.cli_runs import until
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "steady_loop.py"
BROKEN = SCRIPT.with_name("steady_broken.py")
# The style, and at least how many of its 90 steps are only noted.
STYLES = {
    "plain": 70,
    "clip": 70,
    "scaled": 60,
    "scaled-unscale-clip": 60,
    "scaled-unscale-clip-sometimes": 40,
    "scaled-unscale-clip-two": 60,
    "window-scaled-unscale-clip": 60,
    "window-partial": 50,
    "window-discards-evaluates-clip": 40,
    "scaled-unscale-clip-overflow": 50,
    "window-scaled-overflow": 50,
    "scaled-given-rewrites": 50,
    "scaled-twice-retain-closure": 40,
    "retain-twice-closure-clip": 60,
    "evaluates-threads-forks-modes-raises": 40,
    "scaled-direct": 50,
    "scaled-evaluates-always": 60,
    # Clips that leave no trace of what was not finite, and clearings before anybody has looked.
    "scaled-unscale-values-injects-interval": 50,
    "scaled-injects-early-tracker": 50,
    "clip-injects": 25,
    "scaled-unscale-clip-poisons": 50,
    "late-scaled-unscale-clip": 70,
    "late-window-scaled-unscale-clip": 70,
    "late-scaled-unscale-clip-overflow": 60,
    # Every way to clear gradients.
    "window-unset-throws-discards": 50,
    "default-module-throws": 70,
}


WINDOWED = "window"
# Where each window is clipped once, and nothing else.
ALWAYS_CLIPS = ("clip", "scaled-unscale-clip", "retain-twice-closure-clip")
# Where a style steps past its scaler, and the step after.
WITHOUT_UPDATE = (52, 53, 61, 62)


def watched(forge: Forge, directory: Path, style: str, **settings: Any) -> Any:
    """(steps told, all events, the script's own account, how many were noted)"""
    directory.mkdir()
    with listening(directory) as listener:
        spec = specification(directory, **settings)
        run = forge.run(SCRIPT, directory, style, specification=spec)
        while run.poll() is None:
            listener.drain(0.02)
        listener.drain(0.05)
    out, err = run.communicate()
    assert run.returncode == 0, err.decode()
    assert not listener.of(HookDisabled), (style, listener.of(HookDisabled))
    *facts, noted = map(json.loads, out.decode().splitlines())
    return listener.steps(), listener, facts, noted


@pytest.mark.parametrize("loop", STYLES)
def test_what_is_noted_is_true(loop: str, tmp_path: Path, forge: Forge) -> None:
    style = loop
    steps, listener, facts, noted = watched(forge, tmp_path / "run", style)
    assert noted >= STYLES[style], "hardly any step was noted"
    assert [step.step for step in steps] == list(range(1, len(facts) + 1))
    for step, fact in zip(steps, facts, strict=True):
        where = (style, step.step, step, fact)
        assert step.applied == fact["applied"], where
        assert _same(step.losses, fact["losses"]), where
        assert step.samples == fact["samples"], where
        assert step.learning_rates == (fact["lr"],), where
        if fact["before"] is not None:
            assert step.loss_scale_before == fact["before"], where
            # Without an update of the scaler nobody knows; and once after it, for it may not come.
            unknown = (None,) if step.step in WITHOUT_UPDATE else ()
            assert step.loss_scale_after in (fact["after"], *unknown), where
        norm = fact["norm"]
        if style in ALWAYS_CLIPS and step.step > 5:
            assert step.grad_norm is not None, where
        if norm is not None and step.grad_norm is not None and step.step != 1:
            assert _same((step.grad_norm,), [norm]), where
        taken = style == "clip-injects" and step.step >= 41
        assert step.overflow in (None, taken or not fact["applied"]), where
        assert ("evaluation" in step.phase_s) is _evaluated_before(style, step.step), where
        # With one micro-batch per window there is nothing to tell apart, and nothing is looked at.
        assert step.locate_us is None or WINDOWED in style, where
        assert step.duration_s, where
        assert math.isclose(sum(step.phase_s.values()), step.duration_s, rel_tol=1e-6), where
    if "injects" in style:
        located = [(e.step, e.parameter, e.nonfinite) for e in listener.of(OverflowLocated)]
        # Without a scaler the step is taken, and all is lost from there on.
        assert located[:1] == [(41, "3.weight", "inf")]
        assert len(located) == 1 or "scaled" not in style
    if "poisons" in style:
        (found,) = listener.of(OverflowLocated)
        # Its forward was run again, with the batch it had.
        assert (found.step, found.where, found.verdict) == (41, "forward", "bad_batch")
        assert found.evidence == "the batch itself has NaN: tensor 0 of it (4x4)"
    if "discards" in style:
        lost = [(e.after_step, e.micro_batches) for e in listener.of(WindowDiscarded)]
        assert lost == [(23, 1), (46, 1), (69, 1)]
    if "overflow" in style:
        located = [event.step for event in listener.of(OverflowLocated)]
        assert set(located) >= {n for n, fact in enumerate(facts, 1) if not fact["applied"]}
        assert 41 in located


def _evaluated_before(style: str, step: int) -> bool:
    """Whether the script evaluated between the update before and this one's."""
    every = 1 if "always" in style else 11 if "evaluates" in style else 0
    return bool(every) and step > 1 and (step - 1) % every == 0


def _same(told: Any, truth: list[float]) -> bool:
    """Equal in fp32's digits, where a number is finite."""
    return len(told) == len(truth) and all(
        math.isclose(a, b, rel_tol=1e-6) or str(a) == str(b)
        for a, b in zip(told, truth, strict=True)
    )


@pytest.mark.parametrize("kind", ["fails", "interrupts"])
def test_whatever_raises_every_step_is_told(kind: str, tmp_path: Path, forge: Forge) -> None:
    directory, unwatched = tmp_path / "run", tmp_path / "unwatched"
    directory.mkdir()
    unwatched.mkdir()
    plain = forge.run(BROKEN, unwatched, kind, specification=None)
    with listening(directory) as listener:
        spec = specification(directory, memory_every=3)
        run = forge.run(BROKEN, directory, kind, specification=spec)
        while run.poll() is None or plain.poll() is None:
            listener.drain(0.02)
        listener.drain(0.05)
    out, err = run.communicate()
    assert (run.returncode, plain.returncode) == (0, 0), err.decode()
    *facts, (raised, weights) = map(json.loads, out.decode().splitlines())
    *account, (_, truth) = map(json.loads, plain.communicate()[0].decode().splitlines())
    assert (weights, facts) == (truth, account)
    assert len(raised) > 20, "hardly anything was called"
    steps = listener.steps()
    assert [step.step for step in steps] == list(range(1, len(facts) + 1))
    for step, fact in zip(steps, facts, strict=True):
        assert step.applied == fact["applied"], (step, fact)
        assert _same(step.losses, fact["losses"]), (step, fact)
        assert step.samples == fact["samples"], (step, fact)
    told = listener.of(HookDisabled)
    assert {event.hook for event in told} == ({"steady steps"} if kind == "fails" else set())
    # Once each, though some raise while another is dealt with.
    wanted = range(len(raised) - 3, len(raised) + 1) if kind == "fails" else (0,)
    assert len(told) in wanted


def test_the_last_step_is_the_one_asked_for(tmp_path: Path, forge: Forge) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with listening(directory) as listener:
        spec = specification(directory, max_steps=57)
        run = forge.run(SCRIPT, directory, "scaled-unscale-clip", specification=spec)
        while run.poll() is None:
            listener.drain(0.02)
        listener.drain(0.05)
    out, err = run.communicate()
    assert run.returncode == 0, err.decode()
    assert len(out.decode().splitlines()) == 57
    assert [step.step for step in listener.of(StepFinished)] == list(range(1, 58))


def test_a_command_that_comes_while_it_cannot_act_acts_later(tmp_path: Path, forge: Forge) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    script = SCRIPT.with_name("steady_asked.py")
    with listening(directory) as listener:
        # Nothing is sampled: only a command ends the noting.
        cadences = ("grad_norm_every", "memory_every", "gradients_every", "activations_every")
        spec = specification(directory, **dict.fromkeys(cadences, 0))
        run = forge.run(script, directory, specification=spec)
        for count in range(1, 4):
            listener.until(StepFinished, 20 * count)
            ask(listener, f"s{count}", SetSampling(memory_every=1000 * count))
            applied = listener.until(CommandApplied, count, deadline_s=20)
            assert applied.id == f"s{count}"
        ask(listener, "end", StopAtBoundary())
        while run.poll() is None:
            listener.drain(0.05)
    out, err = run.communicate()
    assert run.returncode == 0, err.decode()
    assert int(out) > 20, "hardly any step was noted"


def test_notes_are_followed_as_moments_are() -> None:
    draw = random.Random(0)
    for _ in range(200):
        noted, entered = PhaseClock(0.0), PhaseClock(0.0)
        marks: list[Any] = []
        now, drew = 0.0, False
        for _ in range(12):
            now += draw.random()
            mark = draw.choice(("data", "drawn", "forward", "evaluation", "backward", "ended"))
            if mark == "drawn" and entered.phase != "data":
                continue
            marks += (mark, now)
            # As `Loop` says it, moment by moment.
            if mark in ("forward", "evaluation") and entered.pending_data:
                entered.settle_data("data" if mark == "forward" else "evaluation")
            gap = "data" if mark == "forward" and not drew else None
            entered.enter({"drawn": "other", "ended": "other"}.get(mark, mark), now, gap)
            drew = mark == "drawn" or (drew and mark != "ended")
        assert noted.follow(marks, False) == drew
        (total, seconds), (wanted, phases) = noted.take(now + 1.0), entered.take(now + 1.0)
        assert (total, seconds) == (pytest.approx(wanted), pytest.approx(phases))


def test_what_a_watched_loop_sees(tmp_path: Path, forge: Forge) -> None:
    run = forge.run(SCRIPT.with_name("steady_watched.py"), tmp_path, specification=None)
    until(lambda: run.poll() is not None, "the end of the loop")
    out, err = run.communicate()
    assert run.returncode == 0, err.decode()
    seen = json.loads(out)
    steps, updates, noted = seen["raised"]
    assert steps == updates == 99
    assert noted > 70
    steps, updates, noted = seen["replaced"]
    assert steps == updates == 199
    assert noted > 70, "the loop did not become steady again"
    held, noted = seen["held"]
    assert held == 0, "graphs of scaled losses live on"
    assert noted > 70
    assert seen["limited"] == [7, True]
