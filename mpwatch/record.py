"""Writes the record: every event in compressed chunks, a plain table of steps, roll-ups, the fold.

Owned by the hub alone. An event is numbered when it comes in and is in the file at the next
commit, together with the fold after it, so a hub that takes over continues where the file ends.
A full or failing disk never raises here: what waits is bounded, what was dropped is counted.
"""

import contextlib
import secrets
import sqlite3
import sys
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from mpwatch import rollups, steps_table
from mpwatch.chunks import FRAMES_PER_CHUNK, MAX_CHUNK_BYTES, pack, read_frames
from mpwatch.codec import Frame
from mpwatch.errors import RecordUnreadable
from mpwatch.events import Event, StepFinished
from mpwatch.fold import Fold
from mpwatch.queries import StepPoint
from mpwatch.record_file import open_file
from mpwatch.recorded import pack_fold, read_fold
from mpwatch.steps_table import StepRow, TableState, state_of, step_row
from mpwatch.store import RunView
from mpwatch.vocabulary import STDERR_PREFIX

COMMIT_INTERVAL_S: Final = 0.2
# Without WAL a commit waits for the disk several times.
COMMIT_INTERVAL_WITHOUT_WAL_S: Final = 2.0
COMMIT_EVENTS: Final = 5000
RETRY_S: Final = 5.0
MAX_WAITING_EVENTS: Final = 20_000
MAX_WAITING_BYTES: Final = 64 << 20
RECENT_EVENTS: Final = 4000
RECENT_BYTES: Final = 16 << 20
# How much a record in memory keeps (`--no-record`, or no file could be made).
KEPT_EVENTS_IN_MEMORY: Final = 50_000


class _Entry(msgspec.Struct, frozen=True, gc=False):
    cursor: int
    frame: bytes
    step: StepRow | None


class Record:
    """The hub's history: appended to, committed, and asked. `path` None keeps it in memory."""

    def __init__(self, path: Path | None, run: str, unrecorded: str | None = None) -> None:
        """Open or make the record of `run` at `path`. `unrecorded` says why `path` is None.

        A new record that cannot be made yet (a full disk) is tried again later.

        Raises:
            RecordUnreadable: the file is no record, of another run or of a newer format.
            sqlite3.Error: it is there, and cannot be read or written.
        """
        self.path = path
        self._run = run
        self._unrecorded = unrecorded
        self.error: str | None = None
        self._retry_at = 0.0
        self.committed_at = 0.0
        self._connection: sqlite3.Connection | None = None
        self._open: list[_Entry] = []  # the chunk that is rewritten until it is full
        # Everything not yet committed, and before it what watchers near the head ask for.
        self._recent: deque[_Entry] = deque()
        self._recent_bytes = 0
        self.fold = Fold()
        self.history = secrets.token_hex(8)
        self.journal = "none"
        self._table = TableState()
        try:
            self.fold = read_fold(self._connect())
        except sqlite3.Error as error:
            if path is None or (path.exists() and path.stat().st_size):
                self._disconnect()
                raise
            self._failed(error, self._retry_at - RETRY_S)
        self.fold.state.record_error = self.error or unrecorded
        self.committed = self.fold.state.cursor
        if self._connection is not None:
            self._table = state_of(self._connection, self.fold.state.ranks.values())

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection, meta = open_file(self.path, self._run, self.history)
            self.history, self.journal = meta["history"], meta["journal"]
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- writing --------------------------------------------------------------------------

    def append(self, encoded: bytes, frame: Frame, event: Event) -> int:
        """Number an event, fold it and let it wait for the next commit; returns its cursor."""
        cursor = self.fold.state.cursor + 1
        row = step_row(cursor, frame, event) if isinstance(event, StepFinished) else None
        self._recent.append(_Entry(cursor, encoded, row))
        self._recent_bytes += len(encoded)
        self._trim()
        self.fold.apply(cursor, frame, event)
        return cursor

    def _trim(self) -> None:
        """Forget old committed events; of those that wait, drop the oldest beyond the bound."""
        recent = self._recent
        while len(recent) > RECENT_EVENTS or self._recent_bytes > RECENT_BYTES:
            oldest = recent[0]
            if oldest.cursor > self.committed:
                if len(recent) <= MAX_WAITING_EVENTS and self._recent_bytes <= MAX_WAITING_BYTES:
                    return
                self.fold.state.record_dropped += 1
                self.committed = oldest.cursor
            recent.popleft()
            self._recent_bytes -= len(oldest.frame)

    @property
    def waiting(self) -> int:
        """How many events are not committed yet."""
        return self.fold.state.cursor - self.committed

    def commit_if_due(self, now: float) -> None:
        """Commit when enough events or time have gone by. `now` is a clock in seconds."""
        interval = COMMIT_INTERVAL_S if self.journal != "delete" else COMMIT_INTERVAL_WITHOUT_WAL_S
        overdue = not 0 <= now - self.committed_at < interval
        if self.waiting >= COMMIT_EVENTS or (self.waiting and overdue):
            self.commit(now)

    def commit(self, now: float) -> bool:
        """Write what waits, in one transaction. False: it did not work; tried again after 5 s."""
        if not self.waiting:
            return True
        if self.error is not None and 0 <= self._retry_at - now <= RETRY_S:
            return False
        self.fold.state.record_error = self._unrecorded
        try:
            self._write([entry for entry in self._recent if entry.cursor > self.committed])
        except (sqlite3.Error, RecordUnreadable) as error:
            self._failed(error, now)
            return False
        self.committed_at = now
        if self.error is not None:
            print(f"{STDERR_PREFIX}the record is written again", file=sys.stderr, flush=True)
            self.error = None
        return True

    def _write(self, entries: list[_Entry]) -> None:
        connection = self._connect()
        steps = [entry.step for entry in entries if entry.step is not None]
        newest = self.fold.state.cursor
        connection.execute("BEGIN IMMEDIATE")
        try:
            table = steps_table.write(connection, steps, self._table)
            open_chunk = _write_chunks(connection, self._open, entries)
            connection.execute(
                "INSERT OR REPLACE INTO fold VALUES (1, ?, ?)", (newest, pack_fold(self.fold))
            )
            if self.path is None:
                self._forget_old(connection)
            connection.execute("COMMIT")
        except BaseException:
            # A full disk has rolled back already; then there is nothing to roll back.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        self._open, self._table, self.committed = open_chunk, table, newest

    def _forget_old(self, connection: sqlite3.Connection) -> None:
        gone = self.fold.state.cursor - KEPT_EVENTS_IN_MEMORY
        connection.execute("DELETE FROM chunks WHERE last_cursor <= ?", (gone,))
        connection.execute("DELETE FROM steps WHERE cursor <= ?", (gone,))

    def _failed(self, error: Exception, now: float) -> None:
        if self.error is None:
            text = f"{STDERR_PREFIX}the record cannot be written ({error}); training goes on"
            print(text, file=sys.stderr, flush=True)
        self.error = self.fold.state.record_error = str(error)
        self._retry_at = now + RETRY_S

    def close(self, now: float) -> None:
        """Commit a last time and leave one plain file behind, readable without its writer."""
        self._retry_at = now - 1.0
        self.commit(now)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                if self.journal == "wal" and not self.waiting:
                    # Needs that nobody reads just now; else an empty -wal file simply stays.
                    self._connection.execute("PRAGMA busy_timeout=0")
                    self._connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        self._disconnect()

    # --- answering (see `mpwatch.answers.History`) ----------------------------------------

    @property
    def newest(self) -> int:
        """The cursor that watchers may know: what a successor would know, if it can be written."""
        return self.committed if self.error is None else self.fold.state.cursor

    def view(self) -> RunView:
        """The folded state after everything that came."""
        return self.fold.view()

    def frames_after(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` (cursor, frame) pairs after cursor `after`, oldest first."""
        limit = min(limit, self.newest - after)
        if limit <= 0:
            return []
        recent = self._recent
        if not recent or recent[0].cursor > after + 1:
            frames = [] if self._connection is None else read_frames(self._connection, after, limit)
            if not recent:
                return frames
            # Where the disk failed, what is written ends before what is remembered begins.
            frames = [pair for pair in frames if pair[0] < recent[0].cursor]
            if frames:
                return frames
        start = max(0, after + 1 - recent[0].cursor)
        return [(entry.cursor, entry.frame) for entry in islice(recent, start, start + limit)]

    def steps(self, first: int, last: int | None, points: int) -> tuple[list[StepPoint], int]:
        """Points of the leading optimizer's committed steps; see `rollups.read_points`."""
        if self._connection is None:
            return [], 1
        return rollups.read_points(self._connection, first, last, points)


def _write_chunks(
    connection: sqlite3.Connection, open_chunk: list[_Entry], entries: list[_Entry]
) -> list[_Entry]:
    """Write entries as chunks; the last one is given back, to be written again when it grows."""
    chunk = list(open_chunk)
    size = sum(len(entry.frame) for entry in chunk)
    for entry in entries:
        full = len(chunk) >= FRAMES_PER_CHUNK or size >= MAX_CHUNK_BYTES
        if chunk and (full or entry.cursor != chunk[-1].cursor + 1):
            _write_chunk(connection, chunk)
            chunk, size = [], 0
        chunk.append(entry)
        size += len(entry.frame)
    _write_chunk(connection, chunk)
    return chunk


def _write_chunk(connection: sqlite3.Connection, chunk: list[_Entry]) -> None:
    frames = pack(entry.frame for entry in chunk)
    connection.execute(
        "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)",
        (chunk[0].cursor, chunk[-1].cursor, frames),
    )
