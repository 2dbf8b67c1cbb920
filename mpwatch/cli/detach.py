"""The keeper as a process of its own session, and the wait until it answers for the script.

Forked before anything is written, since run.json names its process; it execs when it is told what
to do, and ends when it is told nothing. Only for `mpwatch run` in a terminal.
"""

import contextlib
import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mpwatch.stopping import stop_now

START_WAIT_S: Final = 20.0


class DetachedKeeper:
    """A forked child that will be the keeper. It has left the terminal and its session."""

    def __init__(self, become: Callable[[dict[str, Any]], None]) -> None:
        """Fork; the child calls `become` with the specification it is given, which execs."""
        told, self._tell = os.pipe()
        # Files may be full or gone; a pipe says for certain whether the command was started.
        self._heard, answer = os.pipe()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._tell)
                os.close(self._heard)
                _wait_and_become(told, answer, become)
            finally:
                os._exit(127)
        os.close(told)
        os.close(answer)

    def start(self, specification: dict[str, Any]) -> None:
        """Tell it what to do."""
        with contextlib.suppress(OSError), open(self._tell, "wb") as pipe:
            pipe.write(json.dumps(specification).encode())

    def give_up(self) -> None:
        """End it: it is not needed."""
        os.close(self._tell)
        os.close(self._heard)
        os.waitpid(self.pid, 0)

    def answers(self, directory: Path) -> bool:
        """Wait until it takes the script of the run in `directory` on.

        False: it ended before that, so the command was not started by anybody. True: the command
        is its to start, whatever becomes of it. Ctrl+C in here stops the script, as it would
        without a screen.
        """
        try:
            if not select.select([self._heard], [], [], START_WAIT_S)[0]:
                return True  # a slow machine; whoever watches sees what comes
            if os.read(self._heard, 1):
                return True
        except KeyboardInterrupt:
            stop_now(directory)
            raise
        finally:
            os.close(self._heard)
        os.waitpid(self.pid, 0)
        return False

    def exit_code(self) -> int | None:
        """The script's exit code; None while the keeper lives, and where it was killed itself."""
        if self._code is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid and os.WIFEXITED(status):
                    self._code = os.WEXITSTATUS(status)
        return self._code


def _wait_and_become(told: int, answer: int, become: Callable[[dict[str, Any]], None]) -> None:
    os.setsid()
    with open(told, "rb") as pipe:
        text = pipe.read()
    if not text:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.set_inheritable(answer, True)
    become({**json.loads(text), "answer": answer})
