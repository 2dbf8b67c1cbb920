"""Reads records: of a running job, of an ended one, of another user, of a damaged disk.

Never writes to the record. What is damaged is read range by range: what can be read is given, and
`Reader.damage` says in one line what could not; nothing readable raises `RecordUnreadable`.
"""

import contextlib
import shutil
import sqlite3
import tempfile
import zlib
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import msgspec

from mpwatch import rollups, salvage
from mpwatch.chunks import FRAMES_PER_CHUNK, read_frames
from mpwatch.errors import RecordUnreadable
from mpwatch.fold import Fold
from mpwatch.numbered import Numbered, decoded
from mpwatch.queries import StepPoint
from mpwatch.record_schema import FORMAT
from mpwatch.store import RunView


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """What the record says about itself."""
    return dict(connection.execute("SELECT name, value FROM meta"))


def read_fold(connection: sqlite3.Connection) -> Fold:
    """The fold after the newest event of the record; folded anew where it was not kept.

    Raises:
        sqlite3.Error: the record is damaged.
    """
    row = connection.execute("SELECT state FROM fold WHERE id = 1").fetchone()
    if row is not None and (kept := _kept_fold(row[0])) is not None:
        return kept
    fold, after = Fold(), 0
    while frames := read_frames(connection, after, 10 * FRAMES_PER_CHUNK):
        for cursor, frame, event in decoded(frames):
            fold.apply(cursor, frame, event)
        after = frames[-1][0]
    return fold


def pack_fold(fold: Fold) -> bytes:
    """The saved form of a fold; compressed, which also brings a checksum."""
    return zlib.compress(fold.dump(), 1)


def _kept_fold(packed: object) -> Fold | None:
    try:
        return Fold.load(zlib.decompress(packed))  # type: ignore[arg-type]
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return None


class Reader:
    """A record opened for reading. Close it: it may hold a copy in a temporary directory."""

    def __init__(self, path: Path) -> None:
        """Open the record at `path`.

        Raises:
            RecordUnreadable: missing, no record, of a newer format, or nothing left to read.
        """
        self.path = path
        self.damage: str | None = None
        self._newest = 0
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._connection: sqlite3.Connection | None = None
        self._salvaged_steps: sqlite3.Connection | None = None
        if not path.is_file():
            raise RecordUnreadable(f"no record at {path}")
        try:
            self._open()
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the record and remove the copy, if one had to be made."""
        for connection in (self._connection, self._salvaged_steps):
            if connection is not None:
                connection.close()
        self._connection = self._salvaged_steps = None
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    # --- opening --------------------------------------------------------------------------

    def _open(self) -> None:
        uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
        try:
            self._connect(uri)
        except sqlite3.OperationalError as error:
            # A killed writer's -wal file in a directory that we may not write to.
            if error.sqlite_errorcode & 0xFF not in (
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_READONLY,
            ):
                raise RecordUnreadable(f"{self.path}: {error}") from None
            self._connect(f"file:{quote(str(self._copied()))}")
        except sqlite3.DatabaseError as error:
            if not salvage.is_damage(error):
                raise RecordUnreadable(f"{self.path}: {error}") from None
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
                raise RecordUnreadable(f"{self.path} is no record (not a database)") from None
            self._salvage()

    def _connect(self, uri: str) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=2.0)
        self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def _copied(self) -> Path:
        self._copy = tempfile.TemporaryDirectory(prefix="mpwatch-record-")
        copy = Path(self._copy.name) / "record.sqlite"
        try:
            shutil.copyfile(self.path, copy)
            wal = self.path.with_name(self.path.name + "-wal")
            if wal.exists():
                shutil.copyfile(wal, copy.with_name(copy.name + "-wal"))
        except OSError as error:
            raise RecordUnreadable(f"{self.path}: {error.strerror}") from None
        return copy

    def _check(self) -> None:
        """Refuse what is no record; find damage where everybody looks first."""
        try:
            version = self._execute("PRAGMA user_version").fetchone()[0]
            if version > FORMAT:
                raise RecordUnreadable(
                    f"{self.path} was written by a newer mpwatch (format {version},"
                    f" this one reads {FORMAT}); update mpwatch"
                )
            self.meta = read_meta(self.connection)
            read_fold(self.connection)
            for column, table in (("first_cursor", "chunks"), ("cursor", "steps")):
                for end in ("max", "min"):  # both at once would read the whole table
                    self._execute(f"SELECT {end}({column}) FROM {table}").fetchone()
        except sqlite3.DatabaseError as error:
            if not salvage.is_damage(error):
                raise RecordUnreadable(f"{self.path} is no record of mpwatch ({error})") from None
            self._salvage()

    def _salvage(self) -> None:
        """From now on read around the damage."""
        if self.damage is not None:
            return
        self.meta = {}
        readable, self._newest = salvage.prepare(self.connection)
        if not readable:
            raise RecordUnreadable(f"{self.path} is damaged and nothing in it can be read")
        with contextlib.suppress(sqlite3.Error):
            self.meta = read_meta(self.connection)
        self.damage = f"{self.path} is damaged; {readable} events of it can still be read"

    @property
    def connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RecordUnreadable(f"{self.path} was closed")
        return self._connection

    def _execute(self, sql: str) -> sqlite3.Cursor:
        return self.connection.execute(sql)

    # --- answering ------------------------------------------------------------------------

    @property
    def history(self) -> str:
        """The name of the history that cursors count in."""
        return self.meta.get("history", "")

    @property
    def newest(self) -> int:
        """The cursor of the newest event that can be read."""
        if self.damage is None:
            row = self._execute(
                "SELECT max(last_cursor) FROM chunks WHERE first_cursor ="
                " (SELECT max(first_cursor) FROM chunks)"
            ).fetchone()
            return int(row[0] or 0)
        return self._newest

    def fold(self) -> Fold:
        """The fold after the newest event, from what can be read."""
        if self.damage is None:
            try:
                return read_fold(self.connection)
            except sqlite3.DatabaseError as error:
                self._meet(error)
        with contextlib.suppress(sqlite3.DatabaseError):
            row = self._execute("SELECT state FROM fold WHERE id = 1").fetchone()
            if row is not None and (kept := _kept_fold(row[0])) is not None:
                return kept
        fold = Fold()
        for cursor, frame, event in decoded(salvage.frames(self.connection, 0)):
            fold.apply(cursor, frame, event)
        return fold

    def view(self) -> RunView:
        """The folded state of the run."""
        return self.fold().view()

    def frames_after(self, after: int, limit: int) -> list[Numbered]:
        """Up to `limit` (cursor, frame) pairs after cursor `after`, oldest first."""
        if self.damage is None:
            try:
                return read_frames(self.connection, after, limit)
            except sqlite3.DatabaseError as error:
                self._meet(error)
        return list(islice(salvage.frames(self.connection, after), limit))

    def steps(self, first: int, last: int | None, points: int) -> tuple[list[StepPoint], int]:
        """Points of the leading optimizer's steps; see `rollups.read_points`."""
        if self.damage is None:
            try:
                return rollups.read_points(self.connection, first, last, points)
            except sqlite3.DatabaseError as error:
                self._meet(error)
        if self._salvaged_steps is None:
            self._salvaged_steps = salvage.steps(self.connection)
        return rollups.read_points(self._salvaged_steps, first, last, points)

    def _meet(self, error: sqlite3.DatabaseError) -> None:
        if not salvage.is_damage(error):
            raise RecordUnreadable(f"{self.path}: {error}") from None
        self._salvage()
