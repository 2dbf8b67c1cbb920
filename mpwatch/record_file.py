"""Opens the file of a record for its one writer: journal mode, tables, and whose record it is.

A file that is not ours, of another run or of a newer format is never touched.
"""

import secrets
import sqlite3
from pathlib import Path

from mpwatch.codec import PROTOCOL
from mpwatch.errors import RecordUnreadable
from mpwatch.record_schema import FORMAT, SCHEMA, wal_is_safe
from mpwatch.recorded import read_meta


def open_file(
    path: Path | None, run: str, history: str | None = None
) -> tuple[sqlite3.Connection, dict[str, str]]:
    """A connection to the record of `run` at `path` (None: in memory), and its `meta`.

    `history` is the name that a new record's history gets; None makes one up.

    Raises:
        RecordUnreadable: the file is no record, of another run or of a newer format.
        sqlite3.Error: it cannot be made, read or written.
    """
    if path is None:
        return _opened(":memory:", "memory", run, history)
    if wal_is_safe(path):
        try:
            return _opened(str(path), "wal", run, history)
        except sqlite3.OperationalError as error:
            # WAL may be reported as on and fail at the first write. A full disk is not that.
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise
    return _opened(str(path), "delete", run, history)


def _opened(
    name: str, journal: str, run: str, history: str | None
) -> tuple[sqlite3.Connection, dict[str, str]]:
    connection = sqlite3.connect(name, isolation_level=None, timeout=2.0)
    try:
        meta = _meta_of(connection, name, run)
        mode = str(connection.execute(f"PRAGMA journal_mode={journal}").fetchone()[0])
        connection.execute("PRAGMA synchronous=NORMAL")
        wanted = {
            "run": run,
            "journal": mode,
            "protocol": str(PROTOCOL),
            "history": meta.get("history") or history or secrets.token_hex(8),
        }
        # A record that is as it should be is not written to: the disk may be full.
        if meta != wanted:
            _make(connection, wanted)
    except BaseException:
        connection.close()
        raise
    return connection, wanted


def _meta_of(connection: sqlite3.Connection, name: str, run: str) -> dict[str, str]:
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        meta = read_meta(connection) if tables and version <= FORMAT else {}
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise RecordUnreadable(f"{name} is no record of mpwatch ({error})") from None
        raise
    if version > FORMAT:
        raise RecordUnreadable(f"{name} has format {version}, known is {FORMAT}")
    if tables and meta.get("run") != run:
        raise RecordUnreadable(f"{name} is the record of run {meta.get('run')}")
    return meta


def _make(connection: sqlite3.Connection, meta: dict[str, str]) -> None:
    """Tables and meta in one transaction: a record is there whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
    connection.execute("COMMIT")
