"""Tells a signal that came to the whole process group from one that came to the keeper alone.

`kill -- -GROUP`, `timeout` and schedulers reach the script themselves; passed on as well, the
second signal would break into its clean-up. `siginfo` looks the same for both. A child in the
group that only waits does not: it hears the first kind and never the second. Standard library only.
"""

import contextlib
import os
import signal
import struct
import time
from collections.abc import Set
from typing import NoReturn

_REPORT = struct.Struct("=Bd")
_LOOK_FOR_PARENT_S = 1.0


class GroupWitness:
    """The waiting child. Where it cannot be had, nothing is ever heard."""

    def __init__(self, signals: Set[signal.Signals]) -> None:
        """Start it; `signals` are blocked already, so it misses none."""
        self._signals = signals
        self._pid: int | None = None
        self._reports: int | None = None
        self._heard: dict[int, float] = {}
        with contextlib.suppress(OSError):
            self._start()

    def heard(self, number: signal.Signals, since: float) -> bool:
        """Whether this signal came to the group after the moment `since` (monotonic)."""
        if self._reports is not None:
            with contextlib.suppress(BlockingIOError):
                while report := os.read(self._reports, _REPORT.size):
                    heard, moment = _REPORT.unpack(report)
                    self._heard[heard] = moment
        return self._heard.get(number, 0.0) >= since

    def end(self) -> None:
        """End the child."""
        if self._pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = None
        if self._reports is not None:
            os.close(self._reports)
            self._reports = None

    def _start(self) -> None:
        reports, mouth = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._wait(parent, mouth)
            finally:
                os._exit(0)
        os.close(mouth)
        os.set_blocking(reports, False)
        self._reports = reports

    def _wait(self, parent: int, mouth: int) -> NoReturn:
        """In the child: report each signal, until the keeper is gone."""
        # Nothing that the script's readers wait for may be held open from here.
        for name in os.listdir("/proc/self/fd"):
            if int(name) != mouth:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        while os.getppid() == parent:
            info = signal.sigtimedwait(self._signals, _LOOK_FOR_PARENT_S)
            if info is not None:
                os.write(mouth, _REPORT.pack(info.si_signo, time.monotonic()))
        os._exit(0)
