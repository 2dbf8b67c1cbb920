"""Dots on a grid of character cells: Braille, eight dots a cell, or one `*` a cell. Pure."""

from typing import Final

# The bit of the dot in row y (0 on top) and column x of a Braille cell.
_BITS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK: Final = 0x2800


class Canvas:
    """A grid of `columns` x `rows` cells; dots are addressed from the bottom left."""

    def __init__(self, columns: int, rows: int, ascii: bool = False) -> None:
        self._across, self._down = (1, 1) if ascii else (2, 4)
        self.width, self.height = columns * self._across, rows * self._down
        self._ascii = ascii
        self._cells = [[0] * columns for _ in range(rows)]

    def dot(self, x: int, y: int) -> None:
        """Set the dot at `x`, `y`; outside of the grid nothing happens."""
        if not (0 <= x < self.width and 0 <= y < self.height):
            return
        from_top = self.height - 1 - y
        row, column = from_top // self._down, x // self._across
        if self._ascii:
            self._cells[row][column] = 1
        else:
            self._cells[row][column] |= _BITS[from_top % 4][x % 2]

    def line(self, x0: int, y0: int, x1: int, y1: int) -> None:
        """Dots from one point to another, without a hole."""
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(length + 1):
            part = step / length
            self.dot(round(x0 + (x1 - x0) * part), round(y0 + (y1 - y0) * part))

    def rows(self) -> list[str]:
        """The grid as text, top row first; an empty cell is a space."""
        if self._ascii:
            return ["".join(" *"[cell] for cell in row) for row in self._cells]
        return ["".join(chr(_BLANK + cell) if cell else " " for cell in r) for r in self._cells]
