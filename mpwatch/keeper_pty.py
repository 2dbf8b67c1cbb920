"""The pseudo-terminal that a detached script prints to, held and read by the keeper.

Standard library only. Reads before it waits, so the script never waits for room; what was read goes
to the output log. Its size never changes, whoever watches; nothing can be typed into it: reading
from it ends at once. The script gets a second hold on it, so that it outlives the keeper.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import termios
import time

from mpwatch.keeper_files import say
from mpwatch.keeper_output import OutputLog

COLUMNS = 100
ROWS = 30
READ_BYTES = 64 << 10
# So much is read between two looks at signals, requests and the hub.
PUMP_BYTES = 4 << 20
QUIET_S = 0.3
DRAIN_S = 2.0
STAND_IN_WAIT_S = 5.0
HESITATE_S = 0.1
TAIL_BYTES = 800

_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
# The last line of a traceback when something was to be typed in. `getpass` says no more than the
# name of the error, as others do that want no keyboard.
_NO_KEYBOARD = re.compile(rb"EOFError: EOF when reading a line|bdb\.BdbQuit")
_NO_PASSWORD = re.compile(rb"getpass\.py.*\nEOFError\s*\Z", re.DOTALL)


class PseudoTerminal:
    """One attempt's terminal. Made before the fork; `enter` is for the child."""

    def __init__(self, log: OutputLog) -> None:
        """Open one.

        Raises:
            OSError: the machine has none left.
        """
        self._log = log
        self._master, self._slave = os.openpty()
        # Held by the script: with no holder left, its next print would fail.
        self.hold = os.dup(self._master)
        self.device = os.fstat(self._slave).st_rdev
        self._pidfd: int | None = None
        # Nobody has the other end open: the last look said so.
        self.hung_up = False
        self._tail = b""
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)
        self._set_modes()
        os.set_blocking(self._master, False)

    def _set_modes(self) -> None:
        modes = termios.tcgetattr(self._slave)
        # Bytes come out as they were written.
        modes[1] &= ~termios.ONLCR
        # A read from /dev/tty (a password) ends at once instead of waiting for ever.
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 0, 0
        termios.tcsetattr(self._slave, termios.TCSANOW, modes)

    def enter(self) -> None:
        """In the child: a session with this terminal; no keyboard."""
        os.setsid()
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
        self._leave_foreground()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, self._slave), (2, self._slave)):
            os.dup2(source, target)
            os.set_inheritable(target, True)
        os.set_inheritable(self.hold, True)

    def _leave_foreground(self) -> None:
        """In the child: no process of the script is the terminal's foreground.

        The foreground gets SIGHUP when the script ends; what a script leaves running on purpose
        would die with it, which it does not in a user's terminal.
        """
        with contextlib.suppress(OSError):
            helper = os.fork()
            if helper == 0:
                try:
                    os.setpgid(0, 0)
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
                    os.tcsetpgrp(self._slave, os.getpgrp())
                finally:
                    os._exit(0)
            os.waitpid(helper, 0)

    def started(self, pid: int) -> None:
        """In the keeper: the child runs."""
        self.let_go()
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def stand_by(self, pid: int) -> None:
        """In the keeper's stand-in: note which process prints, while it surely is that one."""
        # Without it nobody would know when to end: then there is nothing to do here.
        self._pidfd = os.pidfd_open(pid)

    def let_go(self) -> None:
        """Keep only what is read from: what the script has open is the script's."""
        os.close(self._slave)
        os.close(self.hold)

    def take_over(self, log: OutputLog, alone: bool) -> None:
        """In the keeper's stand-in: read on, into a log of its own.

        `alone`: the keeper was killed. Else the script has ended, and others still print.
        """
        self._log = log
        gone = select.poll()
        gone.register(self._pidfd or 0, select.POLLIN)
        # Killed together, or made to die with its keeper: then it does not go on.
        if alone and not gone.poll(HESITATE_S * 1000):
            self._finish_line()
            say("the keeper was killed; the script goes on, but nobody will know its exit code")
        while not gone.poll(0):
            self.pump(STAND_IN_WAIT_S)
        self._pidfd = None
        self._read()
        while not self.hung_up:
            self._wait(STAND_IN_WAIT_S)
            self._read()

    def _finish_line(self) -> None:
        """Read on until a line has ended, so that nothing is said in the middle of it."""
        until = time.monotonic() + HESITATE_S
        while not self._log.between_lines() and time.monotonic() < until:
            self.pump(HESITATE_S)

    def pump(self, seconds: float) -> None:
        """Read until nothing is there; wait at most `seconds` for output or the script's end."""
        if not self._read():
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        if not self.hung_up:
            poll.register(self._master, select.POLLIN)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        poll.poll(seconds * 1000)

    def drain(self) -> None:
        """The script is gone: read what it left, until those it left behind are quiet."""
        until = time.monotonic() + DRAIN_S
        while not self.hung_up and time.monotonic() < until:
            if self._read():
                continue
            poll = select.poll()
            poll.register(self._master, select.POLLIN)
            if not poll.poll(QUIET_S * 1000):
                break

    def close(self) -> None:
        """Let go of it."""
        os.close(self._master)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def wanted_keyboard(self) -> bool:
        """Whether the last thing printed says that something was to be typed in."""
        text = _COLOURS.sub(b"", self._tail).replace(b"\r", b"").rstrip()
        last = text.rpartition(b"\n")[2]
        return _NO_KEYBOARD.match(last) is not None or _NO_PASSWORD.search(text) is not None

    def _read(self) -> int:
        """Move what is there to the log; how many bytes it was."""
        moved = 0
        while moved < PUMP_BYTES:
            data = self._read_some()
            if not data:
                break
            moved += len(data)
            self._log.write(data)
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        return moved

    def _read_some(self) -> bytes:
        """Up to READ_BYTES, though the terminal gives them in small pieces."""
        pieces: list[bytes] = []
        size = 0
        try:
            while size < READ_BYTES:
                piece = os.read(self._master, READ_BYTES)
                if not piece:
                    break
                pieces.append(piece)
                size += len(piece)
            self.hung_up = False
        except BlockingIOError:
            self.hung_up = False
        except OSError:
            # Nobody has the other end open just now; the script can open it again.
            self.hung_up = True
        return b"".join(pieces)
