"""The log: events and the script's output in their order, following the newest line.

Scrolled back it stands still while lines come; back at the end it follows again.
"""

import time

from rich.cells import cell_len, chop_cells

from mpwatch_tui.chart import title
from mpwatch_tui.drawn import Drawn
from mpwatch_tui.looks import Looks, Row
from mpwatch_tui.picture import LogLine, Picture

CLOCK_WIDTH = 9
ROWS_PER_LINE_AT_MOST = 20


class LogPanel(Drawn):
    """The newest lines, wrapped to the width."""

    def __init__(self, looks: Looks, id: str) -> None:
        super().__init__(looks, id)
        # How many rows lie below what is shown; 0 follows the newest.
        self._below = 0
        self._wrapped: list[tuple[LogLine, list[Row]]] = []
        self._wrapped_for = 0

    def changed(self, before: Picture | None, picture: Picture) -> bool:
        return before is None or before.lines is not picture.lines

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        shown_before = sum(len(rows) for _, rows in self._wrapped)
        self._wrap(picture.lines, width)
        body = [row for _, rows in self._wrapped for row in rows]
        room = max(0, height - 1)
        if self._below:
            self._below += max(0, len(body) - shown_before)
        self._below = max(0, min(self._below, len(body) - room))
        end = len(body) - self._below
        where = f" ({self._below} rows below; end)" if self._below else ""
        return [title(f"log{where}", width, self.looks), *body[max(0, end - room) : end]]

    def _wrap(self, lines: tuple[LogLine, ...], width: int) -> None:
        """Wrap what is new; what was wrapped for this width stays."""
        known = {}
        if self._wrapped_for == width:
            known = {line.number: (line, rows) for line, rows in self._wrapped}
        self._wrapped_for = width
        self._wrapped = [
            entry
            if (entry := known.get(line.number)) is not None and entry[0] is line
            else (line, wrapped(line, width, self.looks))
            for line in lines
        ]

    def scroll(self, rows: int) -> None:
        """Move back by `rows` (negative: forward); at the end it follows again."""
        self._below = max(0, self._below + rows)
        self.redraw()

    def page(self) -> int:
        """How many rows one page is."""
        return max(1, self.size.height - 2)


def wrapped(line: LogLine, width: int, looks: Looks) -> list[Row]:
    """One line as rows: the clock, then the text with a hanging indent."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    text = looks.text(line.text).rstrip()
    narrow = width < CLOCK_WIDTH + 30
    indent = 0 if narrow else CLOCK_WIDTH
    room = max(1, width - indent)
    parts = [text] if cell_len(text) <= room else chop_cells(text, room)[:ROWS_PER_LINE_AT_MOST]
    rows: list[Row] = []
    for index, part in enumerate(parts or [""]):
        before = (clock if index == 0 else "").ljust(indent) if indent else ""
        rows.append(((before, "dim"), (part, line.tone)))
    return rows
