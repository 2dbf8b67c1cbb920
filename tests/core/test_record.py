"""The record: every event comes back, the fold and the table of steps with it."""

import math
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import record
from mpwatch.fold import Fold
from mpwatch.numbered import decoded
from mpwatch.recorded import Reader
from tests.support.hub_runs import step
from tests.support.hub_writer import Writer, events_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


# --- what is written comes back -----------------------------------------------------------


def test_every_event_comes_back_under_its_cursor(writer: Writer, path: Path) -> None:
    told = [step(n) for n in range(1, 1201)]
    for first in range(0, 1200, 37):
        writer.tell(*told[first : first + 37])
        writer.commit()
    assert events_of(path) == list(enumerate(told, 1))


def test_the_open_chunk_is_one_row_until_it_is_full(writer: Writer, path: Path) -> None:
    for n in range(1, 601):
        writer.tell(step(n))
        writer.commit()
    rows = sqlite3.connect(path).execute("SELECT first_cursor, last_cursor FROM chunks").fetchall()
    assert rows == [(1, 250), (251, 500), (501, 600)]


def test_a_reader_beside_the_writer_sees_what_was_committed(writer: Writer, path: Path) -> None:
    writer.tell(step(1))
    writer.commit()
    writer.tell(step(2))
    assert len(events_of(path)) == 1
    writer.commit()
    assert len(events_of(path)) == 2


def test_a_second_writer_continues_fold_and_cursors(path: Path) -> None:
    first = Writer(path)
    first.tell(step(1), step(2, applied=False))
    first.commit()
    history = first.record.history
    first.close()
    second = Writer(path)
    assert (second.record.newest, second.record.history) == (2, history)
    second.tell(step(3))
    second.close()
    reader = Reader(path)
    view = reader.view()
    reader.close()
    assert (view.cursor, view.steps, view.applied, view.skipped) == (3, 3, 2, 1)
    assert [cursor for cursor, _ in events_of(path)] == [1, 2, 3]


def test_the_saved_fold_is_the_fold_of_the_saved_events(writer: Writer, path: Path) -> None:
    dice = random.Random(5)
    for n in range(1, 700):
        writer.tell(step(n, loss=dice.random(), phase_s={"forward": dice.random()}))
    writer.commit()
    fold = Fold()
    reader = Reader(path)
    for cursor, envelope, event in decoded(reader.frames_after(0, 10_000)):
        fold.apply(cursor, envelope, event)
    assert repr(fold.view()) == repr(reader.view())
    reader.close()


def test_the_table_of_steps_is_plain(writer: Writer, path: Path) -> None:
    writer.tell(
        step(1, loss=math.nan, grad_norm=math.inf, loss_scale_before=65536.0, overflow=True),
        step(2, samples=None, learning_rates=(0.1, 0.2)),
    )
    writer.tell(step(1), rank=3)
    writer.commit()
    rows = sqlite3.connect(path).execute(
        "SELECT rank, step, applied, overflow, loss, nan_flags, grad_norm, loss_scale,"
        " learning_rate, samples FROM steps"
    )
    assert rows.fetchall() == [
        (0, 1, 1, 1, None, 1, math.inf, 65536.0, None, 8),
        (0, 2, 1, None, 0.5, 0, None, None, 0.1, None),
        (3, 1, 1, None, 1.0, 0, None, None, None, 8),
    ]


def test_the_record_is_one_plain_file_when_its_writer_has_closed_it(path: Path) -> None:
    writer = Writer(path)
    writer.tell(step(1))
    writer.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_step_weighs_no_more_than_its_budget(path: Path) -> None:
    from benchmarks.ingest import BYTES_PER_STEP_BUDGET, realistic_step

    writer, dice = Writer(path), random.Random(1)
    for n in range(1, 5001):
        writer.tell(realistic_step(n, dice))
        if n % 20 == 0:
            writer.commit()
    writer.close()
    assert path.stat().st_size / 5000 <= BYTES_PER_STEP_BUDGET


# --- no file ------------------------------------------------------------------------------


def test_in_memory_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "KEPT_EVENTS_IN_MEMORY", 3000)
    monkeypatch.setattr(record, "RECENT_EVENTS", 500)
    writer = Writer(None)
    for n in range(1, 10_001):
        writer.tell(step(n))
        if n % 100 == 0:
            writer.commit()
    frames = writer.record.frames_after(0, 5000)
    assert frames[0][0] > 1
    assert 10_000 - frames[0][0] >= 2999
    assert writer.record.view().steps == 10_000
    assert writer.record.steps(9000, None, 100)[0][-1].first_step > 9900
    assert writer.record.frames_after(9_990, 50)[-1][0] == 10_000
    writer.close()
