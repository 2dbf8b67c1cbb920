"""The keeper as a process of its own session, and the wait until it has started the script.

Forked before anything is written, since run.json names its process; it execs when it is told what
to do, and ends when it is told nothing. Only for `mpwatch run` in a terminal.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mpwatch import rendezvous
from mpwatch.stopping import stop_now

START_WAIT_S: Final = 20.0
LOOK_EVERY_S: Final = 0.01


class DetachedKeeper:
    """A forked child that will be the keeper. It has left the terminal and its session."""

    def __init__(self, become: Callable[[dict[str, Any]], None]) -> None:
        """Fork; the child calls `become` with the specification it is given, which execs."""
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._tell)
                _wait_and_become(told, become)
            finally:
                os._exit(127)
        os.close(told)

    def start(self, specification: dict[str, Any]) -> None:
        """Tell it what to do."""
        with contextlib.suppress(OSError), open(self._tell, "wb") as pipe:
            pipe.write(json.dumps(specification).encode())

    def give_up(self) -> None:
        """End it: it is not needed."""
        os.close(self._tell)
        os.waitpid(self.pid, 0)


def has_started(keeper: DetachedKeeper, directory: Path) -> bool:
    """Wait until it has spawned the script or said why not; False: it ended before.

    Ctrl+C in here stops the script, as it would without a screen.
    """
    until = time.monotonic() + START_WAIT_S
    try:
        while not _said_something(directory):
            if os.waitpid(keeper.pid, os.WNOHANG)[0]:
                return _said_something(directory)
            if time.monotonic() > until:
                break  # a slow machine; whoever watches sees what comes
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        stop_now(directory)
        raise
    return True


def _said_something(directory: Path) -> bool:
    entries = rendezvous.read_json_lines(directory / rendezvous.KEEPER_FILE)
    return any(entry.get("event") in ("spawned", "exited") for entry in entries)


def _wait_and_become(told: int, become: Callable[[dict[str, Any]], None]) -> None:
    os.setsid()
    with open(told, "rb") as pipe:
        text = pipe.read()
    if not text:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    become(json.loads(text))
