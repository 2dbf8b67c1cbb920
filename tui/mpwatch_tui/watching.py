"""Looks at a job again and again and makes pictures of it, through hubs that die and past its end.

One `look` asks the hub, or the record where no hub answers; a lost connection keeps the last
picture and says so. Runs on a thread of its own (`mpwatch_tui.poller`), since asking may block;
commands come in from the thread that draws.
"""

from typing import Final, NamedTuple

from mpwatch.client import JobOver, JobSource
from mpwatch.codec import Frame
from mpwatch.commands import Command
from mpwatch.errors import MpwatchError, NoAnswer
from mpwatch.events import Event
from mpwatch.numbered import decoded
from mpwatch.store import RunView
from mpwatch_tui.errands import Errands
from mpwatch_tui.history import History
from mpwatch_tui.journal import Journal
from mpwatch_tui.picture import Connection, Facts, Picture
from mpwatch_tui.places import Places
from mpwatch_tui.plotting import Plotting

PER_REQUEST: Final = 2000
REQUESTS_PER_LOOK: Final = 3
# How far back the log begins; the whole history is for `mpwatch tail`.
LOG_BACK: Final = 20_000
FACTS_EVERY_S: Final = 1.0
REVIVE_AFTER_S: Final = 2.0
REVIVE_EVERY_S: Final = 10.0


class _Authority(NamedTuple):
    """What an answerer may decide. `numbers`: which number the next event has; `newest`: that
    its view is the present one, though it may know less than the last picture did."""

    numbers: bool
    newest: bool


class Watching:
    """One watcher of one run."""

    def __init__(self, places: Places, log_back: int | None = LOG_BACK, points: int = 200) -> None:
        """`log_back`: how many events before now the log begins; None: with the first."""
        self._places = places
        self._log_back = log_back
        self._history: History | None = None
        self._journal = Journal()
        self.plotting = Plotting(points)
        self._live: JobSource | None = None
        self._record: JobSource | None = None
        self._view: RunView | None = None
        self._facts: Facts | None = None
        self._facts_at = 0.0
        self._connection: Connection = "connecting"
        self._since = 0.0
        self._hubless_since: float | None = None
        self._revived_at: float | None = None
        self._errands = Errands(places.stop_now)
        self._trouble = ""
        self._damage: str | None = None
        self._apart: str | None = None
        self.behind = False

    # --- called by the thread that draws ----------------------------------------------------

    def ask(self, command: Command) -> None:
        """Give the job a command at the next look."""
        self._errands.want(command)

    def stop_now(self) -> None:
        """End the script at the next look, without waiting for a boundary."""
        self._errands.want(None)

    # --- called by the poller's thread ------------------------------------------------------

    def look(self, now: float) -> Picture:
        """Ask, and make the picture of what is known then. `now`: seconds since the epoch."""
        # In this order: what the last look finds was written before the hub was gone.
        hub = self._places.hub_is_there()
        over = not hub and self._places.is_over()
        self._trouble, self.behind = "", False
        self._apart = None if hub or over else self._places.out_of_reach()
        connection = self._look(hub, over, now)
        if connection != self._connection:
            self._connection, self._since, self._facts_at = connection, now, 0.0
        if self._facts is None or not 0 <= now - self._facts_at < FACTS_EVERY_S:
            self._facts, self._facts_at = self._places.facts(self._view), now
        return Picture(
            facts=self._facts,
            view=self._view or RunView(),
            points=self.plotting.points,
            lines=self._journal.lines,
            connection=self._connection,
            since=self._since,
            now=now,
            asked=self._errands.asked,
            trouble=self._trouble,
            apart=self._apart or "",
        )

    def close(self) -> None:
        """Let go of sockets and files."""
        for source in (self._live, self._record):
            if source is not None:
                source.close()
        self._live = self._record = None

    def _look(self, hub: bool, over: bool, now: float) -> Connection:
        if done := self._errands.begin(now):
            self._journal.say(now, "event", f"stop now: {done}")
        if hub or over or self._apart:
            self._hubless_since = self._revived_at = None
        if over:
            self._read_record(now, _Authority(numbers=True, newest=True), keep_open=True)
            self._errands.give_up("the job has ended", now)
            return "over"
        if self._apart:
            self._read_record(now, _Authority(numbers=True, newest=True))
            self._errands.give_up(self._apart, now)
            return "apart"
        return self._look_at_hub(now) if hub else self._look_without_hub(now)

    def _look_at_hub(self, now: float) -> Connection:
        if self._live is None:
            self._live = self._places.live()
        try:
            self._errands.send(self._live, now)
            self._read(self._live, now, _Authority(numbers=True, newest=True))
        except (NoAnswer, JobOver):
            self._read_record(now, _Authority(numbers=False, newest=False))
            return "silent"
        self._close_record()
        return "live"

    def _look_without_hub(self, now: float) -> Connection:
        if self._hubless_since is None:
            self._hubless_since = now
        # Whoever holds the run next goes on where its record ends.
        self._read_record(now, _Authority(numbers=True, newest=False))
        waited = now - self._hubless_since
        if waited >= REVIVE_AFTER_S:
            self._revive(now)
        seen = self._view is not None and self._connection != "connecting"
        return "lost" if seen or waited >= REVIVE_AFTER_S else "connecting"

    def _read_record(self, now: float, authority: _Authority, keep_open: bool = False) -> None:
        """Look into the record; where there is none, the last picture stays."""
        try:
            if self._record is None:
                self._record = self._places.record()
            self._tell_damage(getattr(self._record, "damage", None), now)
            self._read(self._record, now, authority)
        except MpwatchError as error:
            keep_open = False
            if self._view is None and authority.newest:
                self._trouble = str(error)
        if not keep_open:
            # A hub may be about to take it over: leave nothing open between looks.
            self._close_record()

    def _tell_damage(self, damage: str | None, now: float) -> None:
        if damage is not None and damage != self._damage:
            self._damage = damage
            self._journal.say(now, "bad", damage)

    def _close_record(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None

    def _revive(self, now: float) -> None:
        """A keeper brings its hub back by itself; without one, somebody has to."""
        if self._revived_at is not None and 0 <= now - self._revived_at < REVIVE_EVERY_S:
            return
        self._revived_at = now
        self._places.revive()

    # --- reading ----------------------------------------------------------------------------

    def _read(self, job: JobSource, now: float, authority: _Authority) -> None:
        view = job.view()
        if authority.newest or self._view is None or view.cursor >= self._view.cursor:
            self._view = view
        self.plotting.read(job, view, now)
        if self._history is None:
            # The first picture must not wait for the log.
            self._history, self.behind = self._beginning(view, now), True
            return
        for _ in range(REQUESTS_PER_LOOK):
            reply = job.changes(self._history.after, PER_REQUEST)
            news = self._history.take(reply, authority.numbers)
            if news.anew:
                self._journal.say(
                    now, "warn", "a hub without a record was lost: history begins anew"
                )
                self.plotting.forget()
            if news.missing:
                self._journal.say(now, "warn", f"{news.missing} events are gone")
            for cursor, frame, event in decoded(news.frames):
                self.take(cursor, frame, event)
            self.behind = news.behind
            if not news.behind:
                break
        self._errands.settle(view, now)

    def _beginning(self, view: RunView, now: float) -> History:
        after = 0 if self._log_back is None else max(0, view.cursor - self._log_back)
        if after:
            self._journal.say(now, "event", f"{after} earlier events: mpwatch tail")
        return History(after)

    def take(self, cursor: int, frame: Frame, event: Event) -> None:
        """An event of the history, in order, once."""
        self._journal.event(frame, event)
