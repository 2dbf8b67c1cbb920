"""Overflows and what was found of them are one entry; diagnoses stand once; show prints both."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from mpwatch import codec, events
from mpwatch.cli.summary import summary
from mpwatch.events import Event
from mpwatch.fold import Fold
from mpwatch.run_state import Evidence
from mpwatch.runs import Run
from mpwatch.store import RunView
from tests.support.hub_runs import frame, step


def fold(*told: Event, rank: int = 0) -> RunView:
    found = Fold()
    for sequence, event in enumerate(told):
        found.apply(sequence + 1, codec.decode_frame(frame(event, sequence, rank=rank)), event)
    # A hub that takes over continues from what was dumped.
    return Fold.load(found.dump()).view()


def located(number: int, **fields: Any) -> events.OverflowLocated:
    given: dict[str, Any] = {
        "parameter": "head.weight",
        "module": "head",
        "micro_batch": 2,
        "nonfinite": "inf",
        "loss_scale": 1024.0,
        "verdict": "bad_batch",
        "evidence": "seen",
    }
    return events.OverflowLocated(step=number, **{**given, **fields})


def skipped(number: int) -> Event:
    return step(number, applied=False, overflow=True, loss_scale_before=1024.0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_and_its_location_are_one_entry(order: tuple[int, ...]) -> None:
    told = [skipped(3), located(3), located(4, optimizer=1)]
    view = fold(*(told[index] for index in order))
    found = {(each.step, each.optimizer): each for each in view.overflows}
    assert set(found) == {(3, 0), (4, 1)}
    entry = found[3, 0]
    assert (entry.parameter, entry.micro_batch, entry.kind) == ("head.weight", 2, "inf")
    assert (entry.loss_scale, entry.loss_scale_before) == (1024.0, 1024.0)
    assert (entry.verdict, entry.where) == ("bad_batch", "backward")
    # Only the step counts; what was located without one is still shown.
    assert view.overflow_count == 1


def test_where_nobody_looked_there_is_no_verdict() -> None:
    (entry,) = fold(skipped(3)).overflows
    assert (entry.verdict, entry.parameter, entry.kind) == (None, None, None)


def test_a_diagnosis_told_again_replaces_itself() -> None:
    def said(name: str, evidence: str) -> Event:
        return events.DiagnosisRaised(name=name, severity="fault", step=3, evidence=evidence)

    view = fold(said("a", "first"), said("b", "other"), said("a", "\x1b[31msecond"))
    assert [(each.name, each.evidence) for each in view.diagnoses] == [
        ("a", "second"),
        ("b", "other"),
    ]


def test_the_summary_names_both(tmp_path: Path) -> None:
    told = [
        skipped(3),
        located(3),
        skipped(9),
        located(9, micro_batch=None, micro_batch_reason="not watched", nonfinite=None),
        events.DiagnosisRaised(
            name="unscaled_twice", severity="fault", step=9, evidence="twice", advice="once"
        ),
        step(10, locate_us=85.0),
    ]
    run = Run(tmp_path, "r", None, 0.0, {}, [], False)
    text = summary(run, "running", Evidence(), fold(*told))
    assert "step 3, micro-batch 2: inf in head.weight (head), backward; bad_batch: seen" in text
    assert "step 9, micro-batch unknown (not watched): not finite in head.weight" in text
    assert "fault        unscaled_twice: twice" in text
    assert "advice: once" in text
    assert "85 us per micro-batch" in text
