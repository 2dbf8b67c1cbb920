"""Folds what a script printed into the lines that a terminal would show: cells, not bytes.

Pure: bytes and moments come in, lines go out. The last rows can still be edited (progress bars go
back and draw anew), so a line is told when it can not change any more, and before that, marked as
unfinished, now and then. Each line knows the byte behind it: a fold begun there, with the number
of the next line, goes on as this one would.
"""

import codecs
import re
from collections import deque
from typing import Final, NamedTuple

WINDOW_ROWS: Final = 40
MAX_CELLS: Final = 4000
MAX_HELD: Final = 4096
# A row that was drawn anew is told when the cursor has stayed below it for so long.
SETTLE_S: Final = 1.0
TELL_UNFINISHED_EVERY_S: Final = 1.0

_TOKEN: Final = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    r"|\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<command>[@-~])"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|(?P<held>\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z)"
    r"|\x1b[ -/]*[0-~]"
    r"|(?P<control>[\x00-\x1f\x7f-\x9f])"
)
_PLAIN: Final = re.compile(rb"[^\x00-\x1f\x7f-\xff]*")


class Line(NamedTuple):
    """A row as it stands. `offset` is the byte up to which all is told, this line included."""

    number: int
    text: str
    offset: int
    unfinished: bool


class _Row:
    __slots__ = ("ends", "known", "number", "redrawn", "settled", "text", "told")

    def __init__(self, number: int, known: bool = True) -> None:
        self.number = number
        self.text = ""
        # The byte behind its newline, once the next row exists.
        self.ends: int | None = None
        # False: told by an earlier fold, whose text this one has not seen.
        self.known = known
        self.redrawn = False
        self.settled = not known
        self.told: str | None = None


class OutputFold:
    """The rows that can still change, and the cursor; `feed` edits, `lines` tells."""

    def __init__(self, offset: int = 0, number: int = 0) -> None:
        """Begin at byte `offset`, where line `number` begins."""
        self.offset = offset
        self._rows: deque[_Row] = deque()
        self._gone: list[_Row] = []
        self._told_unfinished_at = float("-inf")
        self._begin(number)
        # The highest row that the cursor was in, since when.
        self._lowest = self._lowest_before = number
        self._marked_at = float("-inf")

    def _begin(self, number: int) -> None:
        first = max(0, number - WINDOW_ROWS + 1)
        self._rows.extend(_Row(n, known=False) for n in range(first, number))
        self._rows.append(_Row(number))
        self._row, self._column = len(self._rows) - 1, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> None:
        """Take in the next bytes, in pieces of any size."""
        *whole, rest = data.split(b"\n")
        for segment in whole:
            self._segment(segment, ended=True)
            self.offset += len(segment) + 1
            self._newline()
        self._segment(rest, ended=False)
        self.offset += len(rest)

    @property
    def number(self) -> int:
        """The line that the next bytes may belong to."""
        return self._rows[-1].number

    def skip(self, size: int, newlines: int) -> int:
        """Leave out bytes that end with a newline; returns how many lines will not be told."""
        last = self._rows[-1]
        self.offset += size
        last.ends = self.offset
        self._gone.extend(self._rows)
        if not last.text:
            self._gone.pop()  # all of it was left out
        self._rows.clear()
        self._begin(last.number + newlines)
        self._lowest = self.number
        return newlines - bool(last.text)

    def skip_within(self, size: int, redrawn: bool) -> None:
        """Leave out bytes of the line that the cursor is in, which goes on.

        `redrawn`: what follows draws it anew; else the line says what is missing in it.
        """
        self.offset += size
        self._decoder.reset()
        self._held = ""
        if not redrawn:
            self._write(self._rows[self._row], f"[{size} bytes left out] ")

    def lines(self, now: float, ended: bool = False) -> list[Line]:
        """What is to be told at the moment `now` (seconds); all that is left where it `ended`."""
        if now - self._marked_at >= SETTLE_S:
            self._lowest_before, self._lowest = self._lowest, self._rows[self._row].number
            self._marked_at = now
        told = [row for row in self._gone if self._is_news(row) or not row.settled]
        told += self._settle(ended)
        lines = [self._line(row, unfinished=False) for row in told]
        self._gone.clear()
        if now - self._told_unfinished_at >= TELL_UNFINISHED_EVERY_S:
            news = [row for row in self._rows if self._is_news(row)]
            if news:
                self._told_unfinished_at = now
            offset = self._told_up_to()
            lines += [self._line(row, unfinished=True)._replace(offset=offset) for row in news]
        return lines

    # --- telling --------------------------------------------------------------------------

    def _settle(self, ended: bool) -> list[_Row]:
        """Rows in the window that will not change, in order; those above them are settled."""
        told = []
        cursor = self._rows[self._row].number
        quiet = min(self._lowest, self._lowest_before)
        for row in self._rows:
            if not row.settled:
                below = row.number < (quiet if row.redrawn else cursor)
                last = row is self._rows[-1]
                if not (ended and (not last or row.text)) and not below:
                    break
                row.settled = True
                told.append(row)
            elif self._is_news(row) and (ended or row.number < quiet):
                told.append(row)
        return told

    @staticmethod
    def _is_news(row: _Row) -> bool:
        text = row.text.rstrip()
        return row.known and text != (row.told or "")

    def _line(self, row: _Row, unfinished: bool) -> Line:
        row.told = row.text.rstrip()
        ends = row.ends
        if ends is None:
            ends = self.offset if row is self._rows[-1] else self._told_up_to()
        return Line(row.number, row.told, ends, unfinished)

    def _told_up_to(self) -> int:
        settled = [row.ends for row in self._rows if row.settled and row.ends is not None]
        return settled[-1] if settled else 0

    # --- editing --------------------------------------------------------------------------

    def _newline(self) -> None:
        self._column = 0
        if self._row < len(self._rows) - 1:
            self._row += 1
            return
        last = self._rows[-1]
        last.ends = self.offset
        self._rows.append(_Row(last.number + 1))
        if len(self._rows) > WINDOW_ROWS:
            self._gone.append(self._rows.popleft())
        self._row = len(self._rows) - 1

    def _segment(self, data: bytes, ended: bool) -> None:
        row = self._rows[self._row]
        text = self._held + self._decoder.decode(data, final=ended)
        self._held = ""
        if _PLAIN.fullmatch(data) and len(text) == len(data):
            if text:
                self._write(row, text)
            return
        for token in _TOKEN.finditer(text):
            if written := token["text"]:
                self._write(self._rows[self._row], written)
            elif command := token["command"]:
                self._command(command, token["parameters"])
            elif control := token["control"]:
                self._control(control)
            elif token["held"] and not ended:
                self._held = token["held"][:MAX_HELD]

    def _write(self, row: _Row, text: str) -> None:
        column = self._column
        if column == len(row.text):
            row.text = (row.text + text)[:MAX_CELLS]
        else:
            row.redrawn = row.redrawn or column < len(row.text)
            before = row.text[:column].ljust(min(column, MAX_CELLS))
            row.text = (before + text + row.text[column + len(text) :])[:MAX_CELLS]
        if column == 0:
            row.known = True
        self._column = min(column + len(text), MAX_CELLS)

    def _control(self, control: str) -> None:
        if control == "\r":
            self._column = 0
        elif control == "\b":
            self._column = max(0, self._column - 1)
        elif control == "\t":
            self._column = min(self._column + 8 - self._column % 8, MAX_CELLS)

    def _command(self, command: str, parameters: str) -> None:
        first = parameters.partition(";")[0]
        number = int(first) if first.isascii() and first.isdecimal() and len(first) < 6 else 0
        count = max(1, number)
        match command:
            case "A" | "F":
                self._row = max(0, self._row - count)
            case "B" | "E":
                self._row = min(len(self._rows) - 1, self._row + count)
            case "C":
                self._column = min(self._column + count, MAX_CELLS)
            case "D":
                self._column = max(0, self._column - count)
            case "G":
                self._column = min(count - 1, MAX_CELLS)
            case "K":
                self._erase(self._rows[self._row], number)
            case "J" if number == 0:
                self._erase(self._rows[self._row], 0)
                for row in list(self._rows)[self._row + 1 :]:
                    self._erase(row, 2)
        if command in "EF":
            self._column = 0
        self._lowest = min(self._lowest, self._rows[self._row].number)

    def _erase(self, row: _Row, mode: int) -> None:
        """0: from the cursor on, 1: up to the cursor, 2: all of it."""
        row.redrawn = row.redrawn or bool(row.text)
        if mode == 2 or (mode == 0 and self._column == 0):
            row.text, row.known = "", True
        elif mode == 0:
            row.text = row.text[: self._column]
        elif mode == 1:
            width = min(self._column + 1, len(row.text))
            row.text = " " * width + row.text[width:]
