"""Removes the runtime directories of runs that ended long ago; `run` calls it when it starts.

They hold empty sockets and locks, which nobody misses; a week later the record alone tells of the
run. Removes only what it knows, and only under all its locks; bounded, and silent when it fails.
"""

import contextlib
import itertools
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

from mpwatch import rendezvous

KEPT_S: Final = 7 * 86400.0
LOOKED_AT_MOST: Final = 1000
REMOVED_AT_MOST: Final = 50

_RUNTIME = re.compile(r"[0-9a-f]{12}")
_LOCK = re.compile(r"hub\.lock|rank-\d+-\d+")
_SOCKETS: Final = frozenset({rendezvous.AGENT_SOCKET, rendezvous.WATCH_SOCKET})


def sweep(root: Path, now: float | None = None) -> int:
    """Remove what ended runs left in the runtime root; returns how many directories."""
    before = (time.time() if now is None else now) - KEPT_S
    removed = 0
    with contextlib.suppress(OSError):
        if not _is_private(root):
            return 0
        with os.scandir(root) as found:
            old = [
                Path(entry.path)
                for entry in itertools.islice(found, LOOKED_AT_MOST)
                if _RUNTIME.fullmatch(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_mtime < before
            ]
        for directory in old[:REMOVED_AT_MOST]:
            with contextlib.suppress(OSError):
                removed += _remove(directory, before)
    return removed


def _is_private(root: Path) -> bool:
    """Whether nobody else could have put something there."""
    found = os.lstat(root)
    mine = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return stat.S_ISDIR(found.st_mode) and mine


def _remove(directory: Path, before: float) -> bool:
    """Remove `directory` if its locks can all be had: whoever holds one lives."""
    names = os.listdir(directory)
    locks = [name for name in names if _LOCK.fullmatch(name)]
    if not _SOCKETS.issuperset(set(names) - set(locks)):
        return False
    if any(os.lstat(directory / name).st_mtime >= before for name in names):
        return False
    held: list[int] = []
    try:
        for name in locks:
            descriptor = rendezvous.try_lock(directory / name)
            if descriptor is None:
                return False
            held.append(descriptor)
        for name in names:
            os.unlink(directory / name)
        os.rmdir(directory)
    finally:
        for descriptor in held:
            os.close(descriptor)
    return True
