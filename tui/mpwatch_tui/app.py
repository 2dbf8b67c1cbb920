"""The app: takes pictures from the looking thread to the screen, and keys to commands.

Owns the process's end (q, Ctrl+C, SIGTERM) and nothing of what is drawn.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from mpwatch.commands import Pause, StopAtBoundary, Unpause
from mpwatch_tui import dialogs
from mpwatch_tui.looks import Looks, WithoutColours
from mpwatch_tui.messages import Looked, LookFailed
from mpwatch_tui.overview import Overview
from mpwatch_tui.picture import Picture
from mpwatch_tui.poller import Poller
from mpwatch_tui.watching import Watching

GUARD_EVERY_S = 1.0
_WITHOUT_COLOURS = WithoutColours()
CODE_OF_SIGTERM = 128 + signal.SIGTERM


class WatchApp(App[int]):
    """The screen on one run."""

    CSS_PATH = Path(__file__).with_name("mpwatch.tcss")
    TITLE = "mpwatch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+q", "detach", priority=False, show=False),
        Binding("ctrl+c", "ask_to_end", show=False, priority=True),
        Binding("question_mark", "explain", show=False),
        Binding("space", "pause", show=False),
    ]

    def __init__(
        self,
        watching: Watching,
        looks: Looks,
        *,
        readonly: bool = False,
        replay: bool = False,
        guard: int | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`guard`: the process that waits for this one. `threaded` False: only `look` looks."""
        super().__init__()
        self.looks = looks
        self._watching = watching
        self._readonly, self._replay = readonly, replay
        self._guard = guard
        self._clock = clock
        self.picture: Picture | None = None
        self._poller = None
        if threaded:
            self._poller = Poller(
                watching,
                lambda picture: self.post_message(Looked(picture)),
                lambda error: self.post_message(LookFailed(f"{type(error).__name__}: {error}")),
            )

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return filters if self.looks.colours else [*filters, _WITHOUT_COLOURS]

    def get_default_screen(self) -> Screen[None]:
        return Overview(self.looks, not (self._replay or self._readonly))

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        # Textual itself handles neither, and would leave the terminal as it is.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(signal.SIGTERM, self._end, CODE_OF_SIGTERM)
            loop.add_signal_handler(signal.SIGINT, self.action_ask_to_end)
        if self._guard is not None:
            self.set_interval(GUARD_EVERY_S, self._mind_the_guard)
        if self._poller is not None:
            self._poller.start()

    def on_unmount(self) -> None:
        if self._poller is not None:
            self._poller.stop()

    def _mind_the_guard(self) -> None:
        """Without the guard nobody waits for this screen, and the shell reads its keys."""
        if os.getppid() != self._guard:
            self._end(CODE_OF_SIGTERM)

    def _end(self, code: int) -> None:
        self.exit(return_code=code)

    # --- pictures ---------------------------------------------------------------------------

    def look(self) -> None:
        """Look now, in this thread (tests; the poller does it otherwise)."""
        self.on_looked(Looked(self._watching.look(self._clock())))

    def on_looked(self, message: Looked) -> None:
        self.picture = message.picture
        overview = self.screen_stack[0]
        if isinstance(overview, Overview) and overview.is_mounted:
            overview.show(message.picture)
            self._watching.plotting.wanted = overview.points_wanted

    def on_look_failed(self, message: LookFailed) -> None:
        text = self.looks.text(message.error, 300)
        self.notify(text, title="look", severity="error", markup=False)

    # --- keys -------------------------------------------------------------------------------

    def action_detach(self) -> None:
        self._end(0)

    def action_explain(self) -> None:
        if not isinstance(self.screen, dialogs.Help):
            self.push_screen(dialogs.Help(self.looks))

    def action_pause(self) -> None:
        if not self._may_command("pause"):
            return
        assert self.picture is not None
        self._watching.ask(Unpause() if self.picture.view.paused else Pause())
        self._hurry()

    def action_ask_to_end(self) -> None:
        if self._replay:
            self._end(0)
            return
        if isinstance(self.screen, dialogs.Ending):
            self.screen.dismiss(dialogs.NOTHING)
            return
        job_lives = self.picture is not None and self.picture.facts.is_live
        if self.picture is not None and not job_lives:
            self._end(0)
            return
        if isinstance(self.screen, dialogs.Help):
            self.screen.dismiss()  # one thing at a time lies over the overview
            return
        self.push_screen(dialogs.Ending(self.looks, not self._readonly), self._ended)

    def _ended(self, answer: str | None) -> None:
        if answer == dialogs.DETACH:
            self._end(0)
        elif answer == dialogs.STOP:
            self._watching.ask(StopAtBoundary())
        elif answer == dialogs.STOP_NOW:
            self._watching.stop_now()
        self._hurry()

    def _may_command(self, what: str) -> bool:
        reason = None
        if self._replay:
            reason = "a record takes no commands"
        elif self._readonly:
            reason = "attached read-only"
        elif self.picture is None or not self.picture.facts.is_live:
            reason = "the job is not running"
        if reason is not None:
            self.notify(reason, title=what, severity="warning")
        return reason is None

    def _hurry(self) -> None:
        if self._poller is not None:
            self._poller.wake()
