"""Follows `keeper.jsonl`, the keeper's append-only file, from the hub's side.

Reads only what was appended since the last look; a line that is not finished waits. Entries that
make no sense are passed over: the file may be cut or from another version.
"""

import json
from pathlib import Path
from typing import Any, Final

from mpwatch.events import JobExited, JobStarted
from mpwatch.vocabulary import clean_text

_MAX_LINE: Final = 1 << 20
MAX_TIME: Final = 1e11


class KeeperTail:
    """The entries of a keeper's file as they come."""

    def __init__(self, path: Path) -> None:
        """Follow `path`, which need not exist yet."""
        self._path = path
        self._offset = 0
        self._rest = b""

    def entries(self) -> list[dict[str, Any]]:
        """What was appended since the last call."""
        try:
            # Most looks find nothing: one stat is cheaper than opening.
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_MAX_LINE]
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                found.append(entry)
        return found


def attempt_of(entry: dict[str, Any]) -> int:
    """The attempt an entry speaks of; the first where it does not say."""
    return _whole(entry.get("attempt")) or 1


def time_of(entry: dict[str, Any], now: float) -> float:
    """When it happened, or `now`."""
    value = entry.get("time")
    good = isinstance(value, int | float) and 0 <= value < MAX_TIME
    return float(value) if good else now  # type: ignore[arg-type]


def job_started(entry: dict[str, Any]) -> JobStarted | None:
    """The event of a "spawned" entry."""
    pid = _whole(entry.get("pid"))
    if pid is None:
        return None
    return JobStarted(pid=pid, process_start_time=_whole(entry.get("start_time")))


def job_exited(entry: dict[str, Any]) -> JobExited | None:
    """The event of an "exited" entry."""
    code = _whole(entry.get("code"))
    if code is None:
        return None
    signal, cause = entry.get("signal"), entry.get("cause")
    return JobExited(
        exit_code=code,
        signal=clean_text(signal, 30) if isinstance(signal, str) else None,
        cause=clean_text(cause) if isinstance(cause, str) else "",
    )


def _whole(value: object) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return value if good else None  # type: ignore[return-value]
