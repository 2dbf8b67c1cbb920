"""A pseudo-terminal with a function of ours running on it in a forked process, as a shell does."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS, LINES = 80, 24


class Terminal:
    """`body` returns the exit code of the process that runs on the terminal."""

    def __init__(
        self, body: Callable[[], int], ignore_hangup: bool = False, **environment: str
    ) -> None:
        self.master, slave = os.openpty()
        self.modes: list[Any] = termios.tcgetattr(slave)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.master)
            os.login_tty(slave)
            _become(body, ignore_hangup, environment)
        self.seen = bytearray()
        self.code: int | None = None
        # Kept open, so that the terminal can be looked at when nobody is left on it.
        self.slave = slave

    def until(self, wanted: str, seconds: float = 30.0) -> None:
        """Read until `wanted` was written."""
        deadline = time.monotonic() + seconds
        while wanted.encode() not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"not on the terminal: {wanted!r}; last {bytes(self.seen[-500:])!r}"
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 1 << 16)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def children(self) -> list[int]:
        """The guard's children: the screen."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def end(self, seconds: float = 20.0) -> int:
        """Read on until the process has ended; its exit code as a shell sees it."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            assert time.monotonic() < deadline, f"does not end; last {bytes(self.seen[-500:])!r}"
            self._read_some()
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
        while self._read_some():
            pass
        return self.code

    def _read_some(self) -> bool:
        if self.master < 0:
            time.sleep(0.01)
            return False
        with contextlib.suppress(OSError):
            if select.select([self.master], [], [], 0.05)[0]:
                data = os.read(self.master, 1 << 16)
                self.seen += data
                return bool(data)
        return False

    def hang_up(self) -> None:
        """What the end of an ssh connection or of a window does."""
        for descriptor in (self.slave, self.master):
            os.close(descriptor)
        self.slave = self.master = -1

    def close(self) -> None:
        """Whatever happened, nothing is left."""
        if self.code is None:
            for pid in [*self.children(), self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if self.master >= 0:
            self.hang_up()


def _become(body: Callable[[], int], ignore_hangup: bool, environment: dict[str, str]) -> None:
    code = 70
    try:
        os.environ.update({"TERM": "xterm-256color", **environment})
        if ignore_hangup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Not what pytest has put in their place.
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        code = body()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
