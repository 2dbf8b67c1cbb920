"""The record's plain table of steps: rows in, what an attempt repeats marked, roll-ups made.

Part of `mpwatch.record`, inside its transaction: a new `TableState` counts once that is committed.
"""

import sqlite3
from collections.abc import Iterable
from typing import Final

import msgspec

from mpwatch import rollups
from mpwatch.codec import Frame
from mpwatch.events import StepFinished
from mpwatch.fold_state import RankState
from mpwatch.record_schema import NAN_GRAD_NORM, NAN_LOSS, SPANS, STEP_COLUMNS

_INSERT: Final = f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(STEP_COLUMNS))})"

StepRow = tuple[int | float | None, ...]


class TableState(msgspec.Struct, frozen=True):
    """The newest step by (rank, optimizer), and how far the roll-ups reach."""

    newest: dict[tuple[int, int], int] = {}
    rolled: rollups.Rolled = (0,) * len(SPANS)


def state_of(connection: sqlite3.Connection, ranks: Iterable[RankState]) -> TableState:
    """The state of a table that was written before."""
    newest = {
        (rank.rank, optimizer): step
        for rank in ranks
        for optimizer, step in rank.newest_steps.items()
    }
    return TableState(newest, rollups.rolled_up_to(connection))


def write(connection: sqlite3.Connection, rows: list[StepRow], state: TableState) -> TableState:
    """Insert rows; what they repeat (an attempt began again before it) becomes superseded."""
    if not rows:
        return state
    newest, rolled = dict(state.newest), state.rolled
    batch: list[StepRow] = []
    for row in rows:
        rank, optimizer, step = int(row[2] or 0), int(row[3] or 0), int(row[4] or 0)
        if step <= newest.get((rank, optimizer), 0):
            connection.executemany(_INSERT, batch)
            batch = []
            rollups.supersede(connection, rank, optimizer, step)
            rolled = rollups.rolled_up_to(connection)
        newest[rank, optimizer] = step
        batch.append(row)
    connection.executemany(_INSERT, batch)
    return TableState(newest, rollups.roll_up(connection, rolled))


def step_row(cursor: int, frame: Frame, event: StepFinished) -> StepRow:
    """The row of a step; its loss scale is the one it was done under."""
    loss, norm = event.loss, event.grad_norm
    flags = (NAN_LOSS if loss is not None and loss != loss else 0) | (
        NAN_GRAD_NORM if norm is not None and norm != norm else 0
    )
    scale = event.loss_scale_before
    return (
        cursor,
        frame.attempt,
        frame.rank,
        event.optimizer,
        event.step,
        0,
        int(event.applied),
        None if event.overflow is None else int(event.overflow),
        event.micro_batches,
        loss,
        event.loss_scale_after if scale is None else scale,
        norm,
        event.learning_rates[0] if event.learning_rates else None,
        event.duration_s,
        event.samples,
        event.tokens,
        frame.time,
        flags,
    )
