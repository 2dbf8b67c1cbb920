"""The panels of the overview: each says which rows it shows and when they may have changed."""

from mpwatch_tui import bars, chart, heading
from mpwatch_tui.drawn import Drawn
from mpwatch_tui.looks import Looks, Row
from mpwatch_tui.picture import Picture

BARS_EVERY_S = 1.0


class Header(Drawn):
    """Who the run is, how fast, how healthy."""

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        return heading.header_rows(picture, width, height, self.looks)


class Footer(Drawn):
    """Connection, newest command, keys."""

    def __init__(self, looks: Looks, id: str, may_command: bool) -> None:
        super().__init__(looks, id)
        self._may_command = may_command

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        live = picture.facts.is_live and picture.connection != "over"
        keys = [("q", "detach" if live else "leave"), ("?", "help")]
        if live and self._may_command and picture.connection != "apart":
            keys.append(("space", "go on" if picture.view.paused else "pause"))
        keys.append(("p", "plot"))
        return [heading.footer_row(picture, keys, width, self.looks)]


class Plot(Drawn):
    """One quantity over steps."""

    def __init__(self, looks: Looks, id: str, kind: str) -> None:
        super().__init__(looks, id)
        self.kind = kind

    def turn_to(self, kind: str) -> None:
        """Show another quantity."""
        self.kind = kind
        self.redraw()

    def changed(self, before: Picture | None, picture: Picture) -> bool:
        return before is None or before.points is not picture.points

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        return chart.chart(chart.KINDS[self.kind], picture.points, width, height, self.looks)


class _Slow(Drawn):
    """A panel whose figures move slowly: once a second is enough."""

    _drawn_at: float | None = None

    def changed(self, before: Picture | None, picture: Picture) -> bool:
        due = self._drawn_at is None or not 0 <= picture.now - self._drawn_at < BARS_EVERY_S
        over = picture.connection == "over"
        if (due or over) and (before is None or before.view is not picture.view):
            self._drawn_at = picture.now
            return True
        return False


class Phases(_Slow):
    """Where the time goes."""

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        return bars.phase_rows(picture.view, width, height, self.looks)


class Memory(_Slow):
    """Where the memory goes."""

    def rows(self, picture: Picture, width: int, height: int) -> list[Row]:
        return bars.memory_rows(picture.view, width, height, self.looks)
