"""What the screen shows at one moment: immutable, made by `watching`, drawn by the panels.

No panel sees an event; a panel is a function of one of these and of its size.
"""

from typing import Literal

import msgspec

from mpwatch.queries import StepPoint
from mpwatch.store import RunView
from mpwatch.vocabulary import LIVE_STATES
from mpwatch_tui.looks import Tone

# "silent": there is a hub and it does not answer. "lost": there is none, though the job lives.
# "apart": who looks from here cannot ask it.
Connection = Literal["connecting", "live", "silent", "lost", "apart", "over"]
Outcome = Literal["pending", "applied", "refused", "done"]


class LogLine(msgspec.Struct, frozen=True):
    """One line of the log. `number` counts from 1; a line may be replaced by a fuller one."""

    number: int
    time: float
    tone: Tone
    text: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What files tell of the run: who it is and what became of it."""

    run_id: str
    name: str | None = None
    state: str = "starting"
    attempt: int = 1
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: str | None = None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The newest command of this screen, and what became of it. `at`: when that was known."""

    words: str
    at: float
    outcome: Outcome = "pending"
    detail: str = ""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the screen shows. `since` is when the connection became what it is."""

    facts: Facts
    view: RunView = RunView()
    points: tuple[StepPoint, ...] = ()
    lines: tuple[LogLine, ...] = ()
    connection: Connection = "connecting"
    since: float = 0.0
    now: float = 0.0
    asked: Asked | None = None
    trouble: str = ""
    # Why the connection is "apart".
    apart: str = ""
