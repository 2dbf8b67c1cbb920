"""The hub as the keeper's child: started beside the script, started again, ended at the end.

Standard library only. The script never waits for a hub and never learns that it died.
"""

import contextlib
import os
import signal
import time

from mpwatch.keeper_files import Journal, say
from mpwatch.spawning import exit_of, given_environment, process_start_time, restore_signals, spawn

TICK_S = 0.2
# A hub that lived this long was well: its next death counts as the first again.
WELL_AFTER_S = 30.0
DEATHS_AT_MOST = 10
LONGEST_WAIT_S = 5.0
GRACE_S = 2.0


class Hub:
    """The hub as a child in its own session: started, started again, ended; never waited for."""

    def __init__(self, command: list[str], log: str, journal: Journal, mask: set[int]) -> None:
        self._command = command
        self._log = log
        self._journal = journal
        self._mask = mask
        self._pid: int | None = None
        self._started_at = 0.0
        self._start_at: float | None = 0.0
        self._quick_deaths = 0
        self._last_code = 0

    def tend(self, now: float) -> None:
        """Start it when it is due; notice that it died."""
        self._look(now)
        if self._pid is None and self._start_at is not None and now >= self._start_at:
            self._start(now)

    def end(self) -> None:
        """Ask it to close the record, and see it gone within GRACE_S.

        One that had died gets a successor for this, so that the record has the end.
        """
        dead = self._pid is None and self._start_at is not None and self._last_code != 0
        self._start_at = None
        if dead:
            self._start(time.monotonic())
        if self._pid is not None:
            # A stopped hub cannot hear SIGTERM before it goes on.
            os.kill(self._pid, signal.SIGTERM)
            os.kill(self._pid, signal.SIGCONT)
            if not self._gone_within(GRACE_S):
                os.kill(self._pid, signal.SIGKILL)
                self._gone_within(GRACE_S)
        if dead and self._last_code:
            say(f"the hub had ended when the script did; see {self._log}")

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._pid is not None and (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait({signal.SIGCHLD}, min(left, TICK_S))
            self._look(time.monotonic())
        return self._pid is None

    def _start(self, now: float) -> None:
        self._started_at = now
        try:
            self._pid = spawn(self._command, given_environment(), self._prepare)
        except OSError:
            self._last_code = 127
            self._died(now)
            return
        self._journal.write("hub_started", pid=self._pid, start_time=process_start_time(self._pid))

    def _prepare(self) -> None:
        """In the child: nothing of the script's reaches it, neither terminal nor descriptors."""
        os.setsid()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            log = os.open(self._log, flags, 0o600)
        except OSError:
            log = nothing
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
            os.set_inheritable(target, True)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(name), False)
        # Asked to end while it is still starting, it must not die: it closes the record first.
        restore_signals(self._mask | {int(signal.SIGTERM)}, frozenset())

    def _look(self, now: float) -> None:
        if self._pid is None:
            return
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return
        code, name = exit_of(status)
        self._journal.write("hub_exited", pid=self._pid, code=code, signal=name)
        self._pid, self._last_code = None, code
        if code == 0 and self._start_at is not None:
            # It found another hub at work; look again later whether that one is still there.
            self._start_at = now + LONGEST_WAIT_S
        else:
            self._died(now)

    def _died(self, now: float) -> None:
        well = now - self._started_at >= WELL_AFTER_S
        self._quick_deaths = 1 if well else self._quick_deaths + 1
        if self._start_at is None:
            return
        if self._quick_deaths >= DEATHS_AT_MOST:
            self._start_at = None
            say(f"the hub ended {self._quick_deaths} times, the run goes on unwatched; {self._log}")
        else:
            self._start_at = now + min(TICK_S * 2 ** (self._quick_deaths - 1), LONGEST_WAIT_S)
