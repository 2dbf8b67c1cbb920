"""The watcher's history equals the record: no gap, no duplicate, whatever becomes of hubs."""

from itertools import pairwise
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpwatch.codec import Frame
from mpwatch.commands import Pause
from mpwatch.events import Event
from mpwatch.numbered import decoded
from mpwatch_tui import watching
from mpwatch_tui.errands import GIVE_UP_SENDING_S
from mpwatch_tui.watching import REVIVE_AFTER_S, Watching
from tests.support.watched_world import World

ACTIONS = st.lists(
    st.sampled_from(
        [
            "happen",
            "happen a lot",
            "start",
            "commit",
            "commit",
            "look",
            "look",
            "kill",
            "start",
            "silence",
            "speak",
            "late",
            "in time",
            "restart",
            "attach",
        ]
    ),
    max_size=60,
)
Seen = list[tuple[int, Frame, Event]]


class Recorder(Watching):
    """A watcher that keeps what it takes."""

    def __init__(self, world: World) -> None:
        super().__init__(world, log_back=None)
        self.seen: Seen = []

    def take(self, cursor: int, frame: Frame, event: Event) -> None:
        super().take(cursor, frame, event)
        self.seen.append((cursor, frame, event))

    def segments(self) -> list[Seen]:
        """What was seen of each history: they begin with event 1."""
        starts = [i for i, entry in enumerate(self.seen) if entry[0] == 1] + [len(self.seen)]
        return [self.seen[a:b] for a, b in pairwise(starts)]


def act(world: World, watchers: list[Recorder], action: str, now: float) -> None:
    match action:
        case "happen":
            world.happen(3)
        case "happen a lot":
            world.happen(50)
        case "commit":
            world.commit()
        case "look":
            for watcher in watchers:
                watcher.look(now)
        case "kill":
            world.kill_hub()
        case "start":
            world.start_hub()
        case "silence" | "speak":
            world.silent = action == "silence"
        case "late" | "in time":
            world.late = action == "late"
        case "restart":
            world.restart()
        case "attach":
            watchers.append(Recorder(world))


def all_of(frames: list[bytes]) -> Seen:
    return list(decoded(enumerate(frames, start=1)))


def played(world: World, actions: list[str]) -> list[Recorder]:
    """Watchers from before the first event, from in between, and from after the end."""
    with patch.object(watching, "PER_REQUEST", 20):
        return _played(world, actions)


def _played(world: World, actions: list[str]) -> list[Recorder]:
    watchers = [Recorder(world)]
    now = 1000.0
    for action in actions:
        act(world, watchers, action, now)
        now += 0.25
    # The last hub answers in time again: what is in no record must be asked for while it lives.
    world.start_hub()
    world.silent = world.late = False
    world.happen(30)
    world.commit()
    look_until_told(watchers, now)
    world.end()
    watchers.append(Recorder(world))
    look_until_told(watchers, now)
    return watchers


def look_until_told(watchers: list[Recorder], now: float) -> None:
    for watcher in watchers:
        for _ in range(1000):
            watcher.look(now)
            if not watcher.behind:
                break


@settings(max_examples=80, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 1000))
def test_every_watcher_sees_the_record(actions: list[str], seed: int) -> None:
    world = World(seed)
    for watcher in played(world, actions):
        assert watcher.seen == all_of(world.events)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 1000))
@example(actions=["start", "happen", "commit", "look", "kill"], seed=0)
def test_without_a_record_each_hub_has_a_history_of_its_own(actions: list[str], seed: int) -> None:
    world = World(seed, recorded=False)
    *watchers, after_the_end = played(world, actions)
    assert after_the_end.seen == []
    told = [all_of(frames) for frames in world.histories]
    for watcher in watchers:
        segments = watcher.segments()
        if told[-1]:
            assert segments[-1] == told[-1]
        # Of hubs that died it saw a beginning, of each once and in their order.
        remaining = iter(told)
        for segment in segments[:-1]:
            assert any(whole[: len(segment)] == segment for whole in remaining)


def test_numbers_given_again_by_a_new_hub_are_followed() -> None:
    """A hub on a full disk tells what it cannot write; its successor does not know of it."""
    world = World(0)
    world.start_hub()
    world.happen(5)
    world.commit()
    world.disk_fails = True
    world.happen(4)
    watcher = Recorder(world)
    look_until_told([watcher], 1.0)
    assert len(watcher.seen) == 9
    # Silent, it leaves only the record, which lags behind: nothing is told twice.
    world.silent = True
    watcher.look(2.0)
    world.silent = False
    watcher.look(3.0)
    assert len(watcher.seen) == 9
    world.kill_hub()
    watcher.look(4.0)
    world.disk_fails = False
    world.start_hub()
    world.happen(3)
    world.commit()
    watcher.look(5.0)
    assert watcher.seen[9:] == all_of(world.events)[5:]


def test_a_lost_hub_keeps_the_last_picture_and_is_revived_after_a_while() -> None:
    world = World(0)
    world.start_hub()
    world.happen(6)
    world.commit()
    watcher = Recorder(world)
    look_until_told([watcher], 99.0)
    alive = watcher.look(100.0)
    assert (alive.connection, alive.view.steps) == ("live", 6)
    world.happen(1)
    world.kill_hub()
    lost = watcher.look(100.25)
    assert (lost.connection, lost.since, lost.view.steps) == ("lost", 100.25, 6)
    assert lost.lines == alive.lines
    assert world.revivals == 0
    watcher.look(100.25 + REVIVE_AFTER_S)
    watcher.look(100.5 + REVIVE_AFTER_S)
    assert world.revivals == 1
    world.start_hub()
    assert watcher.look(110.0).connection == "live"
    assert world.revivals == 1


def test_a_hub_that_starts_is_waited_for_without_alarm() -> None:
    world = World(0)
    watcher = Recorder(world)
    assert watcher.look(10.0).connection == "connecting"
    world.start_hub()
    assert watcher.look(10.25).connection == "live"
    assert world.revivals == 0


def test_a_silent_hub_is_not_a_lost_one() -> None:
    world = World(0)
    world.start_hub()
    world.happen(3)
    world.commit()
    watcher = Recorder(world)
    world.silent = True
    picture = watcher.look(10.0)
    assert (picture.connection, picture.view.steps) == ("silent", 3)
    assert world.revivals == 0


def test_a_command_without_an_answer_is_given_up_with_a_reason() -> None:
    for ends, reason in ((True, "the job has ended"), (False, "the hub does not answer")):
        world = World(0)
        world.start_hub()
        world.silent = True
        watcher = Recorder(world)
        watcher.ask(Pause())
        asked = watcher.look(11.0).asked
        assert asked is not None
        assert asked.outcome == "pending"
        if ends:
            world.end()
        asked = watcher.look(12.0 + GIVE_UP_SENDING_S).asked
        assert asked is not None
        assert (asked.outcome, asked.detail) == ("refused", reason)


def test_a_damaged_record_is_named_once() -> None:
    world = World(0)
    world.start_hub()
    world.happen(3)
    world.end()
    job = world.record()
    job.damage = "record.sqlite is damaged; 3 events"  # type: ignore[attr-defined]
    watcher = Recorder(world)
    with patch.object(world, "record", lambda: job):
        look_until_told([watcher], 1.0)
        lines = watcher.look(2.0).lines
    assert [line.text for line in lines].count("record.sqlite is damaged; 3 events") == 1
