"""Reads the script's terminal on when the keeper is killed: a forked child that waits for that.

Without a reader the script would stop in its next print once the terminal is full. Standard library
only. It costs a waiting process, hears no signal but SIGKILL, and knows no exit code: it only keeps
the output flowing into the log until the script is gone.
"""

import contextlib
import os
import struct
from typing import NoReturn

from mpwatch.keeper_files import Journal
from mpwatch.keeper_output import OutputLog
from mpwatch.keeper_pty import PseudoTerminal
from mpwatch.spawning import process_start_time

_PID = struct.Struct("=q")
_ALL_IS_OVER = b"."
_READ_ON = b"+"
# It never rotates: who reads the log counts on the keeper to say so.
UNBOUNDED = 1 << 62


class StandIn:
    """The waiting child. Made before the script, so that the script can be told who it is."""

    def __init__(self, terminal: PseudoTerminal, directory: str) -> None:
        """Fork it; where that fails, there is none and `pid` is None."""
        self.pid: int | None = None
        self.start_time: int | None = None
        self._tell: int | None = None
        with contextlib.suppress(OSError):
            heard, self._tell = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    os.close(self._tell)
                    _stand_by(heard, terminal, directory)
                finally:
                    os._exit(0)
            os.close(heard)
            self.start_time = process_start_time(self.pid)

    def watch(self, script: int) -> None:
        """Say which process prints."""
        self._say(_PID.pack(script))

    def read_on(self) -> None:
        """The keeper leaves; others that the script left behind still print."""
        self._say(_READ_ON)

    def end(self) -> None:
        """Nothing is left to stand in for."""
        self._say(_ALL_IS_OVER)
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.waitpid(self.pid, 0)
            self.pid = None

    def _say(self, message: bytes) -> None:
        if self._tell is not None:
            with contextlib.suppress(OSError):
                os.write(self._tell, message)


def _stand_by(heard: int, terminal: PseudoTerminal, directory: str) -> NoReturn:
    """In the child: wait for the keeper's last word, or for its end without one."""
    os.setsid()
    terminal.let_go()
    message = os.read(heard, _PID.size)
    if len(message) == _PID.size:
        terminal.stand_by(_PID.unpack(message)[0])
        last_word = os.read(heard, 1)
        if last_word != _ALL_IS_OVER:
            log = OutputLog(directory, Journal(directory), limit=UNBOUNDED)
            terminal.take_over(log, alone=not last_word)
    os._exit(0)
