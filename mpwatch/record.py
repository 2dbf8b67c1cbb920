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

from mpwatch import rollups
from mpwatch.chunks import FRAMES_PER_CHUNK, MAX_CHUNK_BYTES, pack, read_frames
from mpwatch.codec import PROTOCOL, Frame
from mpwatch.errors import RecordUnreadable
from mpwatch.events import Event, StepFinished
from mpwatch.fold import Fold
from mpwatch.queries import StepPoint
from mpwatch.record_schema import (
    FORMAT,
    NAN_GRAD_NORM,
    NAN_LOSS,
    SCHEMA,
    STEP_COLUMNS,
    wal_is_safe,
)
from mpwatch.recorded import pack_fold, read_fold, read_meta
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

_INSERT_STEP: Final = f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(STEP_COLUMNS))})"
_StepRow = tuple[int | float | None, ...]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    cursor: int
    frame: bytes
    step: _StepRow | None


class Record:
    """The hub's history: appended to, committed, and asked. `path` None keeps it in memory."""

    def __init__(self, path: Path | None, run: str) -> None:
        """Open or make the record of `run` at `path`.

        Raises:
            RecordUnreadable: the file is no record, of another run or of a newer format.
            OSError, sqlite3.Error: it cannot be made or written.
        """
        self.path = path
        self.journal = "memory"
        self.fold = Fold()
        self.error: str | None = None
        self.committed = 0
        self._retry_at = 0.0
        self.committed_at = 0.0
        # Everything not yet committed, and before it what watchers near the head ask for.
        self._recent: deque[_Entry] = deque()
        self._recent_bytes = 0
        self._open: list[_Entry] = []  # the chunk that is rewritten until it is full
        self._newest_steps: dict[tuple[int, int], int] = {}
        self._connection = self._connect(run)

    # --- opening --------------------------------------------------------------------------

    def _connect(self, run: str) -> sqlite3.Connection:
        if self.path is None:
            return self._prepare(":memory:", "memory", run)
        if wal_is_safe(self.path):
            try:
                return self._prepare(str(self.path), "wal", run)
            except sqlite3.OperationalError as error:
                # WAL may be reported as on and fail at the first write. A full disk is not that.
                if "full" in str(error):
                    raise
        return self._prepare(str(self.path), "delete", run)

    def _prepare(self, name: str, journal: str, run: str) -> sqlite3.Connection:
        connection = sqlite3.connect(name, isolation_level=None, timeout=2.0)
        try:
            self._refuse_foreign(connection, run)
            given = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
            self.journal = str(given)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
            meta = read_meta(connection)
            written = {"run": run, "journal": self.journal, "protocol": str(PROTOCOL)}
            if "history" not in meta:
                written["history"] = secrets.token_hex(8)
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", written.items())
            self.history = written.get("history") or meta["history"]
            self.fold = read_fold(connection)
        except BaseException:
            connection.close()
            raise
        self.committed = self.fold.state.cursor
        self._newest_steps = {
            (rank.rank, optimizer): step
            for rank in self.fold.state.ranks.values()
            for optimizer, step in rank.newest_steps.items()
        }
        self._rolled = rollups.rolled_up_to(connection)
        return connection

    def _refuse_foreign(self, connection: sqlite3.Connection, run: str) -> None:
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            meta = read_meta(connection) if tables else {}
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                raise
            raise RecordUnreadable(f"{self.path} is no record of mpwatch ({error})") from None
        if version > FORMAT:
            raise RecordUnreadable(f"{self.path} has format {version}, known is {FORMAT}")
        if tables and meta.get("run") != run:
            raise RecordUnreadable(f"{self.path} is the record of run {meta.get('run')}")

    # --- writing --------------------------------------------------------------------------

    def append(self, encoded: bytes, frame: Frame, event: Event) -> int:
        """Number an event, fold it and let it wait for the next commit; returns its cursor."""
        cursor = self.fold.state.cursor + 1
        row = _step_row(cursor, frame, event) if isinstance(event, StepFinished) else None
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
        self.fold.state.record_error = None
        try:
            self._write([entry for entry in self._recent if entry.cursor > self.committed])
        except sqlite3.Error as error:
            self._failed(error, now)
            return False
        self.committed_at = now
        if self.error is not None:
            print(f"{STDERR_PREFIX}the record is written again", file=sys.stderr, flush=True)
            self.error = None
        return True

    def _write(self, entries: list[_Entry]) -> None:
        connection = self._connection
        steps = [entry.step for entry in entries if entry.step is not None]
        open_chunk = self._open
        rolled = self._rolled
        newest_steps = dict(self._newest_steps)
        newest = self.fold.state.cursor
        connection.execute("BEGIN IMMEDIATE")
        try:
            rolled = self._write_steps(steps, rolled)
            open_chunk = self._write_chunks(open_chunk, entries)
            connection.execute(
                "INSERT OR REPLACE INTO fold VALUES (1, ?, ?)", (newest, pack_fold(self.fold))
            )
            if self.path is None:
                self._forget_old()
            connection.execute("COMMIT")
        except BaseException:
            self._newest_steps = newest_steps
            # A full disk has rolled back already; then there is nothing to roll back.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        self._open, self._rolled, self.committed = open_chunk, rolled, newest

    def _write_steps(self, steps: list[_StepRow], rolled: rollups.Rolled) -> rollups.Rolled:
        """Insert rows; what they repeat (an attempt began again before it) becomes superseded."""
        batch: list[_StepRow] = []
        for row in steps:
            rank, optimizer, step = int(row[2] or 0), int(row[3] or 0), int(row[4] or 0)
            if step <= self._newest_steps.get((rank, optimizer), 0):
                self._connection.executemany(_INSERT_STEP, batch)
                batch = []
                rollups.supersede(self._connection, rank, optimizer, step)
                rolled = rollups.rolled_up_to(self._connection)
            self._newest_steps[rank, optimizer] = step
            batch.append(row)
        self._connection.executemany(_INSERT_STEP, batch)
        return rollups.roll_up(self._connection, rolled) if steps else rolled

    def _write_chunks(self, open_chunk: list[_Entry], entries: list[_Entry]) -> list[_Entry]:
        chunk = list(open_chunk)
        size = sum(len(entry.frame) for entry in chunk)
        for entry in entries:
            full = len(chunk) >= FRAMES_PER_CHUNK or size >= MAX_CHUNK_BYTES
            if chunk and (full or entry.cursor != chunk[-1].cursor + 1):
                self._write_chunk(chunk)
                chunk, size = [], 0
            chunk.append(entry)
            size += len(entry.frame)
        self._write_chunk(chunk)
        return chunk

    def _write_chunk(self, chunk: list[_Entry]) -> None:
        frames = pack(entry.frame for entry in chunk)
        self._connection.execute(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)",
            (chunk[0].cursor, chunk[-1].cursor, frames),
        )

    def _forget_old(self) -> None:
        gone = self.fold.state.cursor - KEPT_EVENTS_IN_MEMORY
        self._connection.execute("DELETE FROM chunks WHERE last_cursor <= ?", (gone,))
        self._connection.execute("DELETE FROM steps WHERE cursor <= ?", (gone,))

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
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if self.journal == "wal" and not self.waiting:
                # Needs that nobody reads just now; else the -wal file simply stays, empty.
                self._connection.execute("PRAGMA busy_timeout=0")
                self._connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        self._connection.close()

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
            frames = read_frames(self._connection, after, limit)
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
        return rollups.read_points(self._connection, first, last, points)


def _step_row(cursor: int, frame: Frame, event: StepFinished) -> _StepRow:
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
