"""A run's evidence at a glance: from its record, without a hub and without the whole fold.

For lists of hundreds of runs: one read-only query and a decoder that skips what it does not need.
"""

import contextlib
import sqlite3
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mpwatch.run_state import Evidence

if TYPE_CHECKING:
    from mpwatch.store import RunView


class _Counts(msgspec.Struct):
    steps: int = 0


class _Rank(msgspec.Struct):
    bound_at: float | None = None
    paused: bool = False
    exited: bool = False
    error_type: str | None = None
    error: str | None = None


class _Fold(msgspec.Struct):
    """The few fields of `mpwatch.fold_state.FoldState` that a line of `ls` shows."""

    counts: dict[int, _Counts] = {}
    ranks: dict[int, _Rank] = {}
    silent_s: float | None = None
    stopping: str | None = None


_decoder = msgspec.msgpack.Decoder(_Fold)


def glance(record: Path) -> Evidence | None:
    """What `record` tells, or None where it is missing, damaged or of another version."""
    unreadable = (sqlite3.Error, zlib.error, msgspec.DecodeError, UnicodeDecodeError, TypeError)
    with contextlib.suppress(*unreadable):
        connection = sqlite3.connect(f"{record.as_uri()}?mode=ro", uri=True, timeout=0.2)
        with contextlib.closing(connection):
            row = connection.execute("SELECT state FROM fold WHERE id = 1").fetchone()
        if row is not None:
            return _evidence(_decoder.decode(zlib.decompress(row[0])))
    return None


def _evidence(fold: _Fold) -> Evidence:
    failed = next((rank for rank in fold.ranks.values() if rank.error_type), None)
    leading = fold.counts.get(0)
    return Evidence(
        bound=any(rank.bound_at is not None for rank in fold.ranks.values()),
        steps=0 if leading is None else leading.steps,
        stopping=fold.stopping,
        error_type=None if failed is None else failed.error_type,
        error=None if failed is None else failed.error,
        paused=any(rank.paused for rank in fold.ranks.values()),
        stalled=fold.silent_s is not None,
        exited=any(rank.exited for rank in fold.ranks.values()),
    )


def evidence_of(view: "RunView") -> Evidence:
    """The same from a whole view."""
    return Evidence(
        bound=any(rank.bound_at is not None for rank in view.ranks),
        steps=view.steps,
        stopping=view.stopping,
        error_type=view.error_type,
        error=view.error,
        paused=view.paused,
        stalled=view.stalled,
        exited=any(rank.exited for rank in view.ranks),
    )
