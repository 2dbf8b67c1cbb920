"""History at any zoom agrees with the steps it stands for, through restarts, holes and NaN."""

import math
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import rollups
from tests.support.hub_runs import step
from tests.support.hub_writer import Writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


def expected(losses: dict[int, float], first: int, last: int, width: int) -> list[tuple[int, int]]:
    groups: dict[int, list[int]] = {}
    for n in losses:
        if first <= n <= last:
            groups.setdefault((n - first) // width, []).append(n)
    return [(group[0], len(group)) for group in groups.values()]


@pytest.mark.parametrize("first_step", [1, 777])
def test_points_agree_with_the_steps_they_stand_for(writer: Writer, first_step: int) -> None:
    dice = random.Random(2)
    last_step = first_step + 45_000
    losses = {n: dice.random() for n in range(first_step, last_step + 1)}
    for n, loss in losses.items():
        writer.tell(step(n, loss=loss, applied=n % 7 > 0, loss_scale_before=float(n)))
        if n % 5000 == 0:
            writer.commit()
    writer.commit()
    for first, last, points in [
        (1, None, 100),
        (1, None, 1000),
        (20_011, 20_500, 1000),
        (3, 44_998, 40),
        (1, None, 1),
    ]:
        found, width = writer.record.steps(first, last, points)
        begin, end = max(first, first_step), min(last or last_step, last_step)
        assert 1 <= len(found) <= points
        assert sum(point.count for point in found) == end - begin + 1
        for point in found:
            group = range(point.first_step, point.first_step + point.count)
            assert point.count <= width
            assert point.loss_min == min(losses[n] for n in group)
            assert point.loss_max == max(losses[n] for n in group)
            assert point.loss_mean == pytest.approx(
                math.fsum(losses[n] for n in group) / point.count
            )
            assert point.skipped == sum(n % 7 == 0 for n in group)
            assert (point.loss_scale_min, point.loss_scale_last) == (group[0], group[-1])


def test_the_large_spans_are_rolled_up_and_used(writer: Writer, path: Path) -> None:
    for n in range(1, 61_500):
        writer.tell(step(n, loss=float(n)))
        if n % 5000 == 0:
            writer.commit()
    writer.commit()
    rows = sqlite3.connect(path).execute(
        "SELECT span, count(*), sum(count) FROM rollups GROUP BY 1"
    )
    assert rows.fetchall() == [(50, 1229, 61_450), (1000, 61, 61_000), (30_000, 2, 60_000)]
    points, width = writer.record.steps(1, None, 2)
    assert (len(points), width) == (2, 60_000)
    assert sum(point.count for point in points) == 61_499
    assert points[-1].loss_scale_last is None
    assert points[-1].loss_max == 61_499.0


def test_superseded_steps_leave_the_history_and_stay_in_the_table(
    writer: Writer, path: Path
) -> None:
    for n in range(1, 2101):
        writer.tell(step(n, loss=1.0))
    writer.commit()
    # Both attempts in one commit as well, and twice over.
    for n in range(1051, 1200):
        writer.tell(step(n, loss=2.0), attempt=2)
    for n in range(1100, 2201):
        writer.tell(step(n, loss=3.0), attempt=3)
    writer.commit()
    points, _ = writer.record.steps(1, None, 5000)
    assert [point.first_step for point in points] == list(range(1, 2201))
    assert [point.loss_mean for point in points] == [1.0] * 1050 + [2.0] * 49 + [3.0] * 1101
    superseded = sqlite3.connect(path).execute("SELECT sum(superseded), count(*) FROM steps")
    assert superseded.fetchone() == (1050 + 100, 2100 + 149 + 1101)
    again = sqlite3.connect(":memory:", isolation_level=None)
    sqlite3.connect(path).backup(again)
    kept = again.execute("SELECT * FROM rollups ORDER BY span, first_step").fetchall()
    again.execute("DELETE FROM rollups")
    rollups.roll_up(again, rollups.rolled_up_to(again))
    assert again.execute("SELECT * FROM rollups ORDER BY span, first_step").fetchall() == kept


def test_nan_is_told_from_unknown_and_does_not_hide_its_neighbours(writer: Writer) -> None:
    writer.tell(
        step(1, loss=math.nan), step(2, loss=None), step(3, loss=2.0), step(4, loss=math.inf)
    )
    writer.commit()
    single, _ = writer.record.steps(1, None, 10)
    assert math.isnan(single[0].loss_mean or 0)
    assert single[1].loss_mean is None
    assert (single[3].loss_mean, single[3].loss_max) == (None, math.inf)
    together = writer.record.steps(1, None, 1)[0][0]
    assert (together.loss_min, together.loss_mean, together.loss_max) == (2.0, 2.0, math.inf)


def test_a_hole_in_the_steps_does_not_stop_the_roll_ups(writer: Writer) -> None:
    writer.tell(step(1), step(10**12), step(10**12 + 5000))
    assert writer.commit()
    assert sum(point.count for point in writer.record.steps(1, None, 10)[0]) == 3
