"""The base of all panels: rows of pieces, drawn line by line, only where they changed.

A panel says what its rows are (`rows`); this turns them into strips. Nothing here knows the job.
"""

from functools import cache

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from mpwatch_tui.looks import Looks, Row, style_of
from mpwatch_tui.picture import Picture


@cache
def _styled(base: Style, role: str) -> Style:
    return base + style_of(role)


class Drawn(Widget):
    """A panel that is a function of the picture and of its size."""

    # Selecting text would copy the widget's name instead of what is drawn.
    ALLOW_SELECT = False

    def __init__(self, looks: Looks, id: str) -> None:
        super().__init__(id=id)
        self.looks = looks
        self.picture: Picture | None = None
        self._rows: list[Row] = []
        self._base: Style | None = None

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        """What is drawn: at most `height` rows of at most `width` cells."""
        raise NotImplementedError

    def changed(self, before: Picture | None, picture: Picture) -> bool:
        """Whether the rows may differ; saves the work where it is easy to tell."""
        return True

    def show(self, picture: Picture) -> None:
        """Take a new picture."""
        before, self.picture = self.picture, picture
        if self.changed(before, picture):
            self.redraw()

    def redraw(self) -> None:
        """Make the rows anew and draw those that differ."""
        width, height = self.size
        if self.picture is None or width < 1 or height < 1:
            return
        old, self._rows = self._rows, self.rows(self.picture, width, height)
        for y, row in enumerate(self._rows):
            if y >= len(old) or old[y] != row:
                self.refresh(Region(0, y, width, 1))
        if len(old) > len(self._rows):
            self.refresh()

    def on_resize(self) -> None:
        self._rows = []
        self.redraw()
        self.refresh()

    def on_show(self) -> None:
        self.redraw()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base = None

    def render_line(self, y: int) -> Strip:
        if self._base is None:
            # Asked of the whole tree of widgets: once is enough.
            self._base = self.rich_style
        base = self._base
        row = self._rows[y] if y < len(self._rows) else ()
        segments = [Segment(text, _styled(base, role)) for text, role in row if text]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def text(self) -> str:
        """The rows as plain text, as a person reads them."""
        return "\n".join("".join(piece for piece, _ in row).rstrip() for row in self._rows)
