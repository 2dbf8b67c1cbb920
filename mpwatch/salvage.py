"""Reads what a damaged record still holds: ranges of ids, around the pages that are gone.

Functions over a read-only connection, used by `mpwatch.recorded` once damage was met. A range
that fails is halved until it is small, then left out.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

from mpwatch import rollups
from mpwatch.chunks import FRAMES_PER_CHUNK, unpack
from mpwatch.numbered import Numbered
from mpwatch.record_schema import SCHEMA, STEP_COLUMNS

_BLOCK: Final = 20_000
_SMALLEST: Final = 125
# What an event takes at the least, in chunk and table.
_LEAST_BYTES: Final = 8
# More events than this in one record are not looked for: ten years at three a second.
_MOST_EVENTS: Final = 1 << 30


def is_damage(error: sqlite3.Error) -> bool:
    """Whether `error` says that the file is damaged, not that it is busy or foreign."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by us: a chunk that does not unpack
        return True
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)


def prepare(connection: sqlite3.Connection) -> tuple[int, int]:
    """Let SQLite read a damaged file; how many events it seems to hold, and the newest cursor."""
    # Without this a file that was cut gives nothing at all.
    connection.execute("PRAGMA writable_schema=ON")
    sql = "SELECT first_cursor, last_cursor FROM chunks WHERE first_cursor BETWEEN ? AND ?"
    found = list(_rows(connection, sql, 0))
    return sum(last - first + 1 for first, last in found), max((c[1] for c in found), default=0)


def frames(connection: sqlite3.Connection, after: int) -> Iterator[Numbered]:
    """The (cursor, frame) pairs after cursor `after` that can be read, oldest first."""
    sql = (
        "SELECT first_cursor, frames FROM chunks WHERE first_cursor BETWEEN ? AND ?"
        " ORDER BY first_cursor"
    )
    for first, chunk in _rows(connection, sql, max(0, after - FRAMES_PER_CHUNK)):
        try:
            pairs = unpack(first, chunk)
        except sqlite3.DatabaseError:
            continue
        yield from (pair for pair in pairs if pair[0] > after)


def steps(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The rows of `steps` that can be read, in a database in memory, with roll-ups."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    copy.executescript(SCHEMA)
    sql = f"SELECT {', '.join(STEP_COLUMNS)} FROM steps WHERE cursor BETWEEN ? AND ?"
    places = ", ".join("?" * len(STEP_COLUMNS))
    copy.executemany(f"INSERT OR IGNORE INTO steps VALUES ({places})", _rows(connection, sql, 0))
    rollups.roll_up(copy, rollups.rolled_up_to(copy))
    return copy


def _rows(connection: sqlite3.Connection, sql: str, low: int) -> Iterator[tuple[Any, ...]]:
    """Rows of `sql` (a range of ids) from `low` on, block by block."""
    for start in range(low, _highest(connection) + 1, _BLOCK):
        yield from _range(connection, sql, start, start + _BLOCK - 1)


def _highest(connection: sqlite3.Connection) -> int:
    """A cursor that none lies behind: as somewhere in the file, or by the file's size."""
    highest = 0
    for sql in (
        "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size",
        "SELECT max(first_cursor) FROM chunks",
        "SELECT max(cursor) FROM steps",
        "SELECT cursor FROM fold",
    ):
        with contextlib.suppress(sqlite3.DatabaseError):
            row = connection.execute(sql).fetchone()
            number = int((row and row[0]) or 0)
            highest = max(highest, number // _LEAST_BYTES if "page" in sql else number)
    return min(highest, _MOST_EVENTS)


def _range(
    connection: sqlite3.Connection, sql: str, first: int, last: int
) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(sql, (first, last)).fetchall()
    except sqlite3.DatabaseError:
        if last - first < _SMALLEST:
            return []
        middle = (first + last) // 2
        return _range(connection, sql, first, middle) + _range(connection, sql, middle + 1, last)
