"""A job as its watchers meet it, without processes: hubs that die, keep silent, answer late.

The events are numbered as a record numbers them; what was not committed dies with its hub. Drives
`mpwatch_tui.watching` in tests; `MemoryPlaces` puts a scripted job behind it instead.
"""

import random
from collections.abc import Sequence

import msgspec

from mpwatch.answers import answer
from mpwatch.asking import Asking
from mpwatch.client import JobSource
from mpwatch.commands import Command, decode
from mpwatch.errors import NoAnswer, RecordUnreadable
from mpwatch.events import Event, JobStarted, OutputLine, StepFinished
from mpwatch.numbered import Numbered
from mpwatch.queries import AnyQuery, AnyReply, Send, SendReply, StepPoint
from mpwatch.scripted import ScriptedJob
from mpwatch.store import RunView
from mpwatch_tui.picture import Facts
from tests.support.hub_runs import frame


class Past:
    """What one answerer has of a history: its first `newest` events."""

    def __init__(self, history: str, frames: Sequence[bytes], newest: int) -> None:
        self.history, self._frames, self.newest = history, frames, newest

    def view(self) -> RunView:
        return RunView(cursor=self.newest, steps=self.newest)

    def frames_after(self, after: int, limit: int) -> Sequence[Numbered]:
        last = min(self.newest, after + limit)
        return [(cursor, self._frames[cursor - 1]) for cursor in range(after + 1, last + 1)]

    def steps(self, first: int, last: int | None, points: int) -> tuple[list[StepPoint], int]:
        return [], 1


class World(Asking):
    """The job, its hub and its record; one object answers for all of them."""

    def __init__(self, seed: int, recorded: bool = True) -> None:
        self._dice = random.Random(seed)
        self._recorded = recorded
        self.histories: list[list[bytes]] = [[]]
        self.committed = 0
        self.hub = self.silent = self.over = self.late = self.disk_fails = False
        self.revivals = 0
        self._attempt, self._sequence = 1, 0

    @property
    def events(self) -> list[bytes]:
        return self.histories[-1]

    # --- what happens -------------------------------------------------------------------------

    def happen(self, count: int) -> None:
        """Steps and output, as far as a hub is there to see them."""
        for _ in range(count if self.hub else 0):
            number = self._sequence
            event: Event = OutputLine(text=f"line {number}", number=number, offset=number)
            if number % 3:
                event = StepFinished(step=number, applied=bool(number % 5))
            self._say(event)

    def restart(self) -> None:
        """Another attempt."""
        self._attempt += 1
        self._sequence = 0
        if self.hub:
            self._say(JobStarted(pid=self._attempt))

    def _say(self, event: Event) -> None:
        self.events.append(frame(event, self._sequence, attempt=self._attempt))
        self._sequence += 1

    def commit(self) -> None:
        if self.hub and not self.disk_fails:
            self.committed = len(self.events)

    def kill_hub(self) -> None:
        """What it had not committed is gone with it."""
        del self.events[self.committed :]
        self.hub = self.silent = False

    def start_hub(self) -> None:
        if not self.hub and not self._recorded and self.events:
            self.histories.append([])
            self.committed = 0
        self.hub = True

    def end(self) -> None:
        """The job ends, the hub commits what it has and goes."""
        self.start_hub()
        self.disk_fails = False
        self.commit()
        self.hub, self.over = False, True

    # --- how it is asked (mpwatch_tui.places.Places) ------------------------------------------

    def hub_is_there(self) -> bool:
        return self.hub

    def is_over(self) -> bool:
        return self.over

    def out_of_reach(self) -> str | None:
        return None

    def live(self) -> JobSource:
        return self

    def record(self) -> JobSource:
        if not self._recorded:
            raise RecordUnreadable("no record")
        return _Recorded(self._past(self.committed))

    def facts(self, view: RunView | None) -> Facts:
        return Facts(run_id="world", state="finished" if self.over else "running")

    def revive(self) -> None:
        self.revivals += 1

    def stop_now(self) -> str:
        return "stopped"

    def _past(self, newest: int) -> Past:
        return Past(f"history {len(self.histories)}", self.events, newest)

    def _ask(self, query: AnyQuery) -> AnyReply:
        """As `LiveJob` does it: an answer that comes after its question was given up is dropped."""
        if not self.hub or self.silent or (self.late and self._dice.random() < 0.3):
            raise NoAnswer("the hub does not answer")
        return answer(query, self._past(len(self.events) if self.disk_fails else self.committed))

    def close(self) -> None:
        pass


class _Recorded(Asking):
    def __init__(self, past: Past) -> None:
        self._past = past

    def _ask(self, query: AnyQuery) -> AnyReply:
        return answer(query, self._past)

    def close(self) -> None:
        pass


class MemoryPlaces:
    """A scripted job behind the screen: live until `over`; commands are kept in `job.sent`."""

    def __init__(self, job: ScriptedJob, facts: Facts, connection: str = "live") -> None:
        self.job, self.given, self.connection = job, facts, connection
        self.stopped = 0

    def hub_is_there(self) -> bool:
        return self.connection in ("live", "silent")

    def is_over(self) -> bool:
        return self.connection == "over"

    def out_of_reach(self) -> str | None:
        return "the job runs on node7" if self.connection == "apart" else None

    def live(self) -> JobSource:
        return _Unclosed(self) if self.connection == "live" else _Silent()

    def record(self) -> JobSource:
        return _Unclosed(self)

    def facts(self, view: RunView | None) -> Facts:
        return self.given

    def revive(self) -> None:
        pass

    def stop_now(self) -> str:
        self.stopped += 1
        return "SIGTERM sent"


class _Unclosed(Asking):
    """The scripted job, without its end: sources come and go, the job stays."""

    def __init__(self, places: MemoryPlaces) -> None:
        self._places = places

    def _ask(self, query: AnyQuery) -> AnyReply:
        if self._places.connection == "silent" and self._places.hub_is_there():
            raise NoAnswer("silent")
        if isinstance(query, Send):
            command: Command = decode(msgspec.Raw(query.request.command))
            self._places.job.sent.append((query.request.id, command))
            return SendReply(id=query.id, accepted=True)
        return self._places.job._ask(query)

    def close(self) -> None:
        pass


class _Silent(Asking):
    def _ask(self, query: AnyQuery) -> AnyReply:
        raise NoAnswer("silent")

    def close(self) -> None:
        pass
