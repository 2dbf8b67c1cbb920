"""History of the leading optimizer's steps at any zoom: roll-ups while writing, points on request.

Functions over a connection to a record, shared by the hub and by readers, so that live and
replayed histories agree. A point never needs more than `RAW_STEPS` rows plus the roll-ups.
"""

import math
import sqlite3
from typing import Final

from mpwatch.queries import StepPoint
from mpwatch.record_schema import NAN_GRAD_NORM, NAN_LOSS, SPANS

# Up to this many steps are grouped from single rows: 5 us each.
RAW_STEPS: Final = 20_000
MAX_POINTS: Final = 10_000

# For each span, the last step that its roll-ups cover.
Rolled = tuple[int, ...]

_LEADING: Final = "rank = 0 AND optimizer = 0 AND superseded = 0"
_FINITE_LOSS: Final = "CASE WHEN abs(loss) <= 1.7976931348623157e308 THEN loss END"
# One shape for single steps and roll-ups. `place` orders both and says which of them it is.
_SINGLE: Final = f"""
    SELECT step AS first_step, step AS last_step, step * 2 AS place, 1 AS count,
        1 - applied AS skipped, loss AS loss_min, {_FINITE_LOSS} AS loss_mean, loss AS loss_max,
        {_FINITE_LOSS} IS NOT NULL AS loss_count, loss_scale AS loss_scale_min,
        grad_norm AS grad_norm_max, duration_s, time, nan_flags
    FROM steps WHERE {_LEADING} AND step BETWEEN ? AND ?"""
_ROLLED: Final = """
    SELECT first_step, last_step, first_step * 2 + 1 AS place, count, skipped, loss_min, loss_mean,
        loss_max, loss_count, loss_scale_min, grad_norm_max, duration_s, time, nan_flags
    FROM rollups WHERE span = ? AND first_step BETWEEN ? AND ?"""
_SUMS: Final = """
    min(first_step) AS first_step, max(last_step) AS last_step, max(place) AS place,
    sum(count) AS count, sum(skipped) AS skipped, min(loss_min) AS loss_min,
    sum(loss_mean * loss_count) / sum(loss_count) AS loss_mean, max(loss_max) AS loss_max,
    sum(loss_count) AS loss_count, min(loss_scale_min) AS loss_scale_min,
    max(grad_norm_max) AS grad_norm_max,
    sum(duration_s * count) / sum(CASE WHEN duration_s IS NULL THEN 0 ELSE count END)
        AS duration_s,
    max(time) AS time, max(nan_flags & 1) + max(nan_flags & 2) AS nan_flags"""
_LAST_SCALE: Final = f"""
    CASE WHEN place & 1 THEN
        (SELECT r.loss_scale_last FROM rollups r WHERE r.span = ? AND r.first_step = place >> 1)
    ELSE
        (SELECT s.loss_scale FROM steps s WHERE {_LEADING} AND s.step = place >> 1)
    END"""
_POINT: Final = f"""
    first_step, count, skipped, loss_min, loss_mean, loss_max, loss_scale_min, {_LAST_SCALE},
    grad_norm_max, duration_s, time, nan_flags"""
_ROLL_UP: Final = f"""
    INSERT OR REPLACE INTO rollups
    SELECT ?, ?, last_step, count, skipped, loss_min, loss_mean, loss_max, loss_count,
        loss_scale_min, {_LAST_SCALE}, grad_norm_max, duration_s, time, nan_flags
    FROM (SELECT {_SUMS} FROM ({{source}})) WHERE count"""


def rolled_up_to(connection: sqlite3.Connection) -> Rolled:
    """How far the roll-ups of each span reach."""
    return tuple(
        connection.execute(
            "SELECT coalesce(max(first_step) + span - 1, 0) FROM rollups WHERE span = ?", (span,)
        ).fetchone()[0]
        for span in SPANS
    )


def roll_up(connection: sqlite3.Connection, rolled: Rolled) -> Rolled:
    """Make the roll-ups of every span whose last step has come."""
    reached: list[int] = []
    for level, span in enumerate(SPANS):
        done = rolled[level]
        newest = reached[-1] if level else _extreme(connection, "max", done) or 0
        while newest >= done + span:
            # Jump over steps that are not there: a run may begin far behind 1.
            oldest = _oldest_behind(connection, level, done)
            first = (oldest - 1) // span * span + 1
            last = first + span - 1
            if newest < last:
                break
            if level:
                below = SPANS[level - 1]
                values: tuple[int, ...] = (span, first, below, below, first, last)
                connection.execute(_ROLL_UP.format(source=_ROLLED), values)
            else:
                connection.execute(_ROLL_UP.format(source=_SINGLE), (span, first, 0, first, last))
            done = last
        reached.append(done)
    return tuple(reached)


def _oldest_behind(connection: sqlite3.Connection, level: int, step: int) -> int:
    if not level:
        return _extreme(connection, "min", step) or step + 1
    sql = "SELECT min(first_step) FROM rollups WHERE span = ? AND first_step > ?"
    return int(connection.execute(sql, (SPANS[level - 1], step)).fetchone()[0] or step + 1)


def _extreme(connection: sqlite3.Connection, which: str, after: int) -> int | None:
    row = connection.execute(
        f"SELECT {which}(step) FROM steps WHERE {_LEADING} AND step > ?", (after,)
    ).fetchone()
    return None if row[0] is None else int(row[0])


def supersede(connection: sqlite3.Connection, rank: int, optimizer: int, step: int) -> None:
    """Steps from `step` on are done again: keep their rows, take them out of the history."""
    connection.execute(
        "UPDATE steps SET superseded = 1"
        " WHERE superseded = 0 AND rank = ? AND optimizer = ? AND step >= ?",
        (rank, optimizer, step),
    )
    if rank == 0 and optimizer == 0:
        connection.execute("DELETE FROM rollups WHERE first_step + span > ?", (step,))


def read_points(
    connection: sqlite3.Connection, first: int, last: int | None, points: int
) -> tuple[list[StepPoint], int]:
    """Steps `first`..`last` (None: the newest) in at most `points` points, and their width.

    Raises:
        sqlite3.Error: the record is damaged.
    """
    oldest, newest = _extreme(connection, "min", first - 1), _extreme(connection, "max", first - 1)
    if oldest is None or newest is None:
        return [], 1
    first, last = oldest, newest if last is None else min(last, newest)
    points = max(1, min(points, MAX_POINTS))
    width = max(1, math.ceil((last - first + 1) / points))
    # Single steps `first`..`middle` and from `end` on, roll-ups in between.
    span, origin, middle, end = SPANS[0], first, last + 1, last + 1
    if last - first >= RAW_STEPS:
        span = max((span for span in SPANS if span <= width), default=SPANS[0])
        # Points begin where roll-ups do, so that no roll-up lies in two of them.
        origin = (first - 1) // span * span + 1
        width = math.ceil((last - origin + 1) / points / span) * span
        middle = origin if origin == first else origin + span
        end = min(last, rolled_up_to(connection)[SPANS.index(span)]) // span * span + 1
        end = max(end, middle)
    rows = connection.execute(
        f"SELECT {_POINT} FROM (SELECT {_SUMS} FROM ({_SINGLE} UNION ALL {_ROLLED}"
        f" UNION ALL {_SINGLE}) GROUP BY (first_step - ?) / ?) ORDER BY first_step",
        (span, first, middle - 1, span, middle, end - 1, end, last, origin, width),
    )
    return [_point(row) for row in rows], width


def _point(row: tuple[float | None, ...]) -> StepPoint:
    *values, flags = row
    if int(flags or 0) & NAN_LOSS and values[3] is None:
        values[3:6] = [math.nan] * 3
    if int(flags or 0) & NAN_GRAD_NORM and values[8] is None:
        values[8] = math.nan
    return StepPoint(*values)  # type: ignore[arg-type]
