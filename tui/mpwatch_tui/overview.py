"""The overview: which panels there are, where they stand at each size, and the keys on them."""

from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen

from mpwatch_tui.chart import KINDS, known
from mpwatch_tui.drawn import Drawn
from mpwatch_tui.log_panel import LogPanel
from mpwatch_tui.looks import Looks
from mpwatch_tui.panels import Footer, Header, Memory, Phases, Plot
from mpwatch_tui.picture import Picture

# Below this there is room for one picture at a time.
SMALL: Final = (80, 24)
LOW: Final = 32
WIDE: Final = 160
SECOND_PLOTS: Final = ("scale", "norm", "seconds")
SLOTS: Final = ("loss", "second", "phases", "memory")


class Overview(Screen[None]):
    """Header, plots, bars, log, footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "turn", show=False),
        Binding("up", "back(1)", show=False),
        Binding("down", "back(-1)", show=False),
        Binding("pageup", "page(1)", show=False),
        Binding("pagedown", "page(-1)", show=False),
        Binding("home", "back(100000)", show=False),
        Binding("end", "back(-100000)", show=False),
    ]

    def __init__(self, looks: Looks, may_command: bool) -> None:
        super().__init__()
        self._header = Header(looks, "header")
        self._footer = Footer(looks, "footer", may_command)
        self._loss, self._second = Plot(looks, "loss", "loss"), Plot(looks, "second", "scale")
        self._phases, self._memory = Phases(looks, "phases"), Memory(looks, "memory")
        self._log = LogPanel(looks, "log")
        self._picture: Picture | None = None
        self._slot = 0
        self._turned = False

    @property
    def panels(self) -> tuple[Drawn, ...]:
        return (
            self._header,
            self._loss,
            self._second,
            self._phases,
            self._memory,
            self._log,
            self._footer,
        )

    def compose(self) -> ComposeResult:
        yield self._header
        with Container(id="body"):
            with Container(id="pictures"):
                with Container(id="plots"):
                    yield self._loss
                    yield self._second
                with Container(id="bars"):
                    yield self._phases
                    yield self._memory
            yield self._log
        yield self._footer

    def on_resize(self, event: events.Resize) -> None:
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int, height: int) -> None:
        small = width < SMALL[0] or height < SMALL[1]
        self.set_class(small, "-small")
        self.set_class(height < LOW, "-low")
        self.set_class(width >= WIDE and not small, "-wide")
        shown = SLOTS[self._slot % len(SLOTS)]
        for name in SLOTS:
            self.query_one(f"#{name}").display = not small or name == shown
        self.query_one("#plots").display = not small or shown in ("loss", "second")
        self.query_one("#bars").display = not small or shown in ("phases", "memory")

    @property
    def points_wanted(self) -> int:
        """Two points a cell of the widest plot."""
        return 2 * max(20, self._loss.size.width, self._second.size.width)

    def show(self, picture: Picture) -> None:
        """Draw what changed; hidden panels wait until they are shown."""
        self._picture = picture
        self._choose_second(picture)
        for panel in self.panels:
            if panel.display:
                panel.show(picture)

    def _choose_second(self, picture: Picture) -> None:
        """Until somebody turns: the loss scale, or what there is where nothing is scaled."""
        if self._turned or not picture.points or known(KINDS[self._second.kind], picture.points):
            return
        for name in SECOND_PLOTS:
            if known(KINDS[name], picture.points):
                self._second.turn_to(name)
                return

    def action_turn(self) -> None:
        """The next plot; where there is room for one panel only, the next panel."""
        if self.has_class("-small"):
            self._slot += 1
            self._arrange(*self.size)
        else:
            self._turned = True
            place = SECOND_PLOTS.index(self._second.kind) + 1
            self._second.turn_to(SECOND_PLOTS[place % len(SECOND_PLOTS)])
        if self._picture is not None:
            self.call_after_refresh(self.show, self._picture)

    def action_back(self, rows: int) -> None:
        self._log.scroll(rows)

    def action_page(self, pages: int) -> None:
        self._log.scroll(pages * self._log.page())
