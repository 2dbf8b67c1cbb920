"""When nobody reads the script's terminal any more, its output goes to the log directly.

Only for a script that the keeper detached, and only when both the keeper and its stand-in were
killed: without a reader the next prints would wait for ever. Called at boundaries; a look costs one
system call while the keeper lives. Descriptors are checked before they are touched: the script may
have closed them and opened others.
"""

import contextlib
import fcntl
import os
import stat
import struct
from typing import Any, Final

from mpwatch import rendezvous
from mpwatch.vocabulary import STDERR_PREFIX

# Asks a master which terminal it holds.
_TIOCGPTN: Final = 0x80045430
_READ_BYTES: Final = 64 << 10
LOOK_EVERY_S: Final = 0.2


def orphan_of(spec: dict[str, Any]) -> "Orphan | None":
    """The look-out of a detached script; None where the script prints elsewhere."""
    if not spec.get("output"):
        return None
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
        return Orphan(spec["output"])
    return None


class Orphan:
    """Notices that the readers are gone and takes the output over."""

    def __init__(self, output: dict[str, Any]) -> None:
        """`output` is what the keeper said of the terminal and of who reads it.

        Raises:
            KeyError, TypeError, ValueError: it is not what this version understands.
        """
        self._log_path = str(output["log"])
        self._hold = int(output["hold"])
        self._device = int(output["device"])
        # Process and its start time: the keeper, and its stand-in where it has one.
        self._readers = [(int(pid), start) for pid, start in output["readers"] if pid is not None]
        self._keeper = self._readers[0][0]
        self._log: int | None = None
        self._given_up = False
        self._looked_at = 0.0

    def look(self, now: float) -> None:
        """At the moment `now` (seconds): take the output over if nobody reads it."""
        if self._log is not None:
            self._move()
        elif not self._given_up and os.getppid() != self._keeper:
            # The keeper is gone, or this process was started by a launcher.
            self._look_for_readers(now)

    def _look_for_readers(self, now: float) -> None:
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        if not any(rendezvous.is_alive(*reader) for reader in self._readers):
            self._take_over()

    def _take_over(self) -> None:
        self._given_up = True
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._log = os.open(self._log_path, flags, 0o600)
            # What was printed first comes first.
            self._move()
            for descriptor in (1, 2):
                if self._is_ours(descriptor):
                    os.dup2(self._log, descriptor)
            self._move()
            line = f"{STDERR_PREFIX}keeper and stand-in are gone; output goes to the log directly\n"
            os.write(self._log, line.encode())

    def _move(self) -> None:
        """From the terminal to the log: what nobody has read."""
        if self._log is None or not self._holds():
            return
        with contextlib.suppress(OSError):
            while data := os.read(self._hold, _READ_BYTES):
                os.write(self._log, data)

    def _is_ours(self, descriptor: int) -> bool:
        """Whether this descriptor is the terminal that nobody reads."""
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            return stat.S_ISCHR(found.st_mode) and found.st_rdev == self._device
        return False

    def _holds(self) -> bool:
        """Whether our hold on the terminal is still that, and can be read without waiting."""
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(self._hold, _TIOCGPTN, struct.pack("I", 0))
            number = struct.unpack("I", answer)[0]
            return number == os.minor(self._device) and not os.get_blocking(self._hold)
        return False
