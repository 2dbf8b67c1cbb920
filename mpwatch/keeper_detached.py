"""Everything a detached script has instead of the user's terminal: log, pseudo-terminal, stand-in.

The keeper's one door to them. Standard library only; nothing in here may end the keeper, and what
goes wrong is said in the log.
"""

import os
import time

from mpwatch.keeper_files import Journal, say
from mpwatch.keeper_output import OutputLog
from mpwatch.keeper_pty import PseudoTerminal
from mpwatch.keeper_stand_in import StandIn
from mpwatch.spawning import process_start_time


class DetachedOutput:
    """Where the script prints: to a terminal of its own or, where there is none, to the log."""

    def __init__(self, directory: str, journal: Journal) -> None:
        """Open the log; from here on the keeper's own lines go there too."""
        self._directory = directory
        self._log = OutputLog(directory, journal)
        self._terminal: PseudoTerminal | None = None
        self._stand_in: StandIn | None = None
        self._failed = False

    def open(self) -> None:
        """Before the spawn: a terminal, and who reads it when the keeper is killed."""
        try:
            self._terminal = PseudoTerminal(self._log)
            self._stand_in = StandIn(self._terminal, self._directory)
        except OSError as error:
            say(f"runs without a terminal of its own: {error.strerror or error}")

    def for_agent(self) -> dict[str, object] | None:
        """What the agent needs when nobody reads any more; see `mpwatch_agent.orphan`."""
        if self._terminal is None or self._stand_in is None:
            return None
        return {
            "log": self._log.path,
            "hold": self._terminal.hold,
            "device": self._terminal.device,
            "readers": [
                [os.getpid(), process_start_time(os.getpid())],
                [self._stand_in.pid, self._stand_in.start_time],
            ],
        }

    def enter(self) -> None:
        """In the child, before the exec."""
        if self._terminal is not None:
            self._terminal.enter()
        else:
            os.setsid()
            self._log.give_away()

    def started(self, pid: int) -> None:
        """The script runs."""
        if self._terminal is not None:
            self._terminal.started(pid)
        if self._stand_in is not None:
            self._stand_in.watch(pid)

    def wait(self, seconds: float) -> None:
        """Read what is there; else wait for output or the script's end, at most `seconds`."""
        if self._terminal is None:
            time.sleep(seconds)
            return
        try:
            self._terminal.pump(seconds)
        except Exception as error:
            if not self._failed:
                say(f"the output cannot be read: {type(error).__name__}: {error}")
            self._failed = True
            time.sleep(seconds)

    def finish(self, code: int) -> None:
        """The script has ended with `code`: its last words, and why, where it wanted a keyboard."""
        try:
            if self._terminal is not None:
                self._terminal.drain()
                if code and self._terminal.wanted_keyboard():
                    say("nothing can be typed into a run with a screen; use mpwatch run --headless")
                self._terminal.close()
            self._log.close()
            if self._stand_in is not None and self._terminal is not None:
                if self._terminal.hung_up:
                    self._stand_in.end()
                else:
                    self._stand_in.read_on()
        except Exception as error:
            say(f"the end of the output may be missing: {type(error).__name__}: {error}")
