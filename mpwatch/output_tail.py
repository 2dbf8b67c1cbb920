"""Follows output.log and makes events of its lines: the hub's side of what the script printed.

Goes on where the record says that telling ended, whoever told before, through rotations of the
log. Bounded per look: what comes faster is left out, counted, and stands in the log.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from mpwatch import rendezvous
from mpwatch.events import OutputLine
from mpwatch.output_fold import Line, OutputFold
from mpwatch.vocabulary import clean_text

LINES_PER_S: Final = 200.0
LINES_AT_ONCE: Final = 400.0
# The end of a script is what people look for: told whatever came before.
LAST_LINES: Final = 100.0
READ_BYTES: Final = 256 << 10
# Farther behind than this, the middle is left out.
BEHIND_BYTES: Final = 2 << 20
# So long the rest is read at the end, before only its last bytes are: the hub has to be gone soon.
DRAIN_S: Final = 0.8
LATE_BYTES: Final = 16 << 10
LINE_CHARACTERS: Final = 2000


class OutputTail:
    """The lines of one run's output, from where telling ended before."""

    def __init__(self, directory: Path, offset: int = 0, number: int = 0) -> None:
        """Go on at byte `offset` of the whole output, where line `number` begins."""
        self._directory = directory
        self._path = directory / rendezvous.OUTPUT_LOG
        self._fold = OutputFold(offset, number)
        self._file: int | None = None
        # Where the open file is read next.
        self._position = 0
        self._allowance = LINES_AT_ONCE
        self._looked_at: float | None = None
        self._left_out = 0

    def look(self, now: float, ended: bool = False) -> list[OutputLine]:
        """What is new at the moment `now` (seconds). `ended`: nothing will follow."""
        if self._looked_at is not None:
            passed = max(0.0, now - self._looked_at)
            self._allowance = min(LINES_AT_ONCE, self._allowance + passed * LINES_PER_S)
        self._looked_at = now
        with contextlib.suppress(OSError):
            self._read(whole=ended)
        if ended:
            self._allowance = max(self._allowance, LAST_LINES)
        return self._told(self._fold.lines(now, ended))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _told(self, lines: list[Line]) -> list[OutputLine]:
        room = int(self._allowance)
        if len(lines) > room:
            final = [line for line in lines if not line.unfinished]
            kept = final[max(0, len(final) - room) :]
            self._left_out += len(final) - len(kept)
            lines = kept
        self._allowance -= len(lines)
        events = []
        for line in lines:
            left_out, self._left_out = self._left_out, 0
            events.append(
                OutputLine(
                    text=clean_text(line.text, LINE_CHARACTERS),
                    number=line.number,
                    offset=line.offset,
                    left_out=left_out,
                    unfinished=line.unfinished,
                )
            )
        return events

    # --- the file -------------------------------------------------------------------------

    def _read(self, whole: bool) -> None:
        """Feed what is new; not all of it at once, unless nothing will follow."""
        if self._file is None and not self._open():
            return
        until = time.monotonic() + DRAIN_S
        while self._file is not None:
            behind = os.fstat(self._file).st_size - self._position
            late = whole and time.monotonic() > until
            if behind > (LATE_BYTES if late else BEHIND_BYTES):
                self._leave_out(behind - (LATE_BYTES if late else READ_BYTES))
            data = os.pread(self._file, READ_BYTES, self._position)
            if data:
                self._fold.feed(data)
                self._position += len(data)
                if not whole:
                    return
            elif not self._next_file():
                return

    def _leave_out(self, size: int) -> None:
        """Pass over about `size` bytes: up to the end of a line; in an endless one, within it."""
        assert self._file is not None
        passed = newlines = lines_end = redrawn_at = 0
        while passed < size:
            wanted = min(READ_BYTES, size - passed)
            data = os.pread(self._file, wanted, self._position + passed)
            if not data:
                break
            if count := data.count(b"\n"):
                newlines += count
                lines_end = passed + data.rfind(b"\n") + 1
            if b"\r" in data:
                redrawn_at = passed + data.rfind(b"\r")
            passed += len(data)
        if lines_end:
            self._left_out += self._fold.skip(lines_end, newlines)
        end = lines_end
        if passed - end > READ_BYTES // 2:
            end = redrawn_at if redrawn_at >= passed - READ_BYTES // 2 else passed
            self._fold.skip_within(end - lines_end, redrawn=end == redrawn_at)
        self._position += end

    def _pass_over(self, size: int, newlines: int) -> None:
        """Leave out what is in no file any more."""
        if newlines > 0:
            self._left_out += self._fold.skip(size, newlines)
        else:
            self._fold.skip_within(size, redrawn=False)

    def _next_file(self) -> bool:
        """Go on to the file that took the place of the one being read, which is at its end."""
        assert self._file is not None
        here = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            return False
        if here.st_size > self._position:
            return True
        # Not simply that one: it may have been replaced more than once.
        self.close()
        return self._open()

    def _open(self) -> bool:
        """Open the file that holds the byte to go on from; where that is gone, the oldest one."""
        if not os.path.exists(self._path):
            return False  # headless: it prints elsewhere
        rotations = _rotations(self._directory)
        begins = rotations[-1][0] if rotations else 0
        path = self._path
        if self._fold.offset < begins:
            path = self._path.with_name(f"{self._path.name}.1")
            begins, lines = rotations[-2] if len(rotations) > 1 else (0, 0)
            if self._fold.offset < begins:
                self._pass_over(begins - self._fold.offset, lines - self._fold.number)
        file = os.open(path, _FLAGS)
        if _rotations(self._directory) != rotations:
            os.close(file)
            return False
        self._file, self._position = file, self._fold.offset - begins
        return True


_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def _rotations(directory: Path) -> list[tuple[int, int]]:
    """Where each later file begins: (bytes before it, newlines before it), oldest first."""
    return [
        (entry["at"], entry["lines"])
        for entry in rendezvous.read_json_lines(directory / rendezvous.KEEPER_FILE)
        if entry.get("event") == "output_rotated"
        and isinstance(entry.get("at"), int)
        and isinstance(entry.get("lines"), int)
    ]
