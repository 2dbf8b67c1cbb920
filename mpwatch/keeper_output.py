"""output.log: what the script printed, byte for byte, bounded; what was lost is counted.

The keeper alone writes it, and its own lines on stderr go there too. Standard library only. A full
disk never raises and never holds the script up: what cannot be written is counted. Bytes are
numbered over the whole run; `output_rotated` in keeper.jsonl says with which one a file begins.
"""

import contextlib
import os

from mpwatch.keeper_files import Journal

OUTPUT_LOG = "output.log"
# Of the file being written; one older file of this size is kept beside it.
LIMIT_BYTES = 64 << 20


class OutputLog:
    """The log of one run: written, rotated when it is full, never waited for."""

    def __init__(
        self, directory: str, journal: Journal, limit: int = LIMIT_BYTES, own_lines: bool = True
    ) -> None:
        """Open it. `own_lines`: what this process writes to stdout and stderr goes there too."""
        self._own_lines = own_lines
        self.path = os.path.join(directory, OUTPUT_LOG)
        self._journal = journal
        self._limit = limit
        self._descriptor: int | None = None
        self._size = 0
        self._begins_at = 0
        self._lines = 0
        self._lost = 0
        self._open()

    def write(self, data: bytes) -> None:
        """Append; rotates before the bytes that would not fit."""
        if self._size and self._size + len(data) > self._limit:
            self._rotate()
        if self._lost and not self._tell_lost():
            self._lost += len(data)
            return
        written = self._append(data)
        self._lines += data.count(b"\n")
        self._lost += len(data) - written

    def between_lines(self) -> bool:
        """Whether what was printed so far ends where a line ends, whoever wrote it."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
        return True

    def give_away(self) -> None:
        """In a child: print to the log itself; never rotated."""
        for number in (1, 2):
            os.set_inheritable(number, True)

    def close(self) -> None:
        """Tell of what was lost last; where the log has no room for it, only in keeper.jsonl."""
        if self._lost and not self._tell_lost():
            self._note_lost(self._begins_at + self._size)

    def _append(self, data: bytes) -> int:
        """How many bytes were written."""
        written = 0
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                self._open()
            while self._descriptor is not None and written < len(data):
                written += os.write(self._descriptor, data[written:])
        self._size += written
        return written

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._descriptor).st_size
            # What the keeper has to say stands where people look for what went wrong.
            for number in (1, 2) if self._own_lines else ():
                os.dup2(self._descriptor, number, inheritable=False)

    def _rotate(self) -> None:
        if self._descriptor is None:
            return
        try:
            size = os.fstat(self._descriptor).st_size
            os.rename(self.path, f"{self.path}.1")
        except OSError:
            return  # grows on rather than being lost
        old, self._descriptor = self._descriptor, None
        self._begins_at += size
        self._journal.write("output_rotated", at=self._begins_at, lines=self._lines)
        self._open()
        os.close(old)

    def _tell_lost(self) -> bool:
        """Say in the log, where it happened, that bytes are missing; False: still no room."""
        line = f"\nmpwatch: {self._lost} bytes of output could not be written here\n".encode()
        at = self._begins_at + self._size
        if self._append(line) < len(line):
            return False
        self._note_lost(at)
        return True

    def _note_lost(self, at: int) -> None:
        self._journal.write("output_lost", bytes=self._lost, at=at)
        self._lost = 0
