"""What lies over the overview: the question that Ctrl+C asks, and the help."""

from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from mpwatch_tui.looks import Looks, style_of

# From this size on the questions stand in whole sentences, in a frame.
ROOMY: Final = (60, 8)
DETACH, STOP, STOP_NOW, NOTHING = "detach", "stop", "stop_now", "nothing"

_KEYS: Final = (
    ("q", "leave; the job goes on"),
    ("space", "pause at the next boundary, or go on"),
    ("p", "another plot or panel"),
    ("ctrl+c", "leave, stop at the boundary, or stop now"),
    ("up down", "scroll the log, pgup pgdn by pages"),
    ("end", "follow the log again"),
    ("?", "this help"),
)


def _lines(lines: tuple[tuple[str, str], ...], width: int) -> Text:
    text = Text()
    for index, (key, does) in enumerate(lines):
        text.append("\n" if index else "")
        text.append(f"{key:<{width}}", style_of("key"))
        text.append(does)
    return text


class Help(ModalScreen[None]):
    """What the keys do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space,ctrl+c", "dismiss", show=False)
    ]

    def __init__(self, looks: Looks) -> None:
        super().__init__(classes="-ascii" if looks.ascii else "")

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text("keys", style_of("strong")))
            yield Static(_lines(_KEYS, 9))


class Ending(ModalScreen[str]):
    """Ctrl+C: what shall end, the screen or the job?"""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d,q,enter", f"answer('{DETACH}')", show=False),
        Binding("s", f"answer('{STOP}')", show=False),
        Binding("k", f"answer('{STOP_NOW}')", show=False),
        Binding("escape,n,ctrl+c", f"answer('{NOTHING}')", show=False),
    ]

    def __init__(self, looks: Looks, may_stop: bool) -> None:
        super().__init__(classes="-ascii" if looks.ascii else "")
        self._may_stop = may_stop

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(id="question")
            yield Static(id="answers")

    def on_resize(self, event: events.Resize) -> None:
        # Keys act whether or not their lines are to be seen: on a small terminal, in few words.
        few = event.size.width < ROOMY[0] or event.size.height < ROOMY[1]
        self.set_class(few, "-few")
        lines = [("d", "leave" if few else "leave; the job goes on (Enter)")]
        if self._may_stop:
            lines += [
                (
                    "s",
                    "stop, boundary" if few else "stop the job at the next boundary, exit code 0",
                ),
                ("k", "stop now" if few else "stop the job now, in the middle of a step"),
            ]
        lines.append(("esc", "nothing"))
        question = "Leave, or stop the job?" if self._may_stop else "Leave? (read-only)"
        asked = Text("leave or stop?" if few else question, style_of("strong"))
        self.query_one("#question", Static).update(asked)
        self.query_one("#answers", Static).update(_lines(tuple(lines), 4 if few else 5))

    def action_answer(self, answer: str) -> None:
        if answer in (STOP, STOP_NOW) and not self._may_stop:
            return
        self.dismiss(answer)
