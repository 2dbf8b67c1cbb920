"""The hub without sockets: what it takes, what it counts, what it answers, who gets which order."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch import codec, events, fold, hub, wire
from mpwatch.codec import PROTOCOL
from mpwatch.command_desk import MAX_PENDING
from mpwatch.commands import Command, CommandRequest, Pause, SetSampling, StopAtBoundary
from mpwatch.events import KINDS, AgentBound, Event, Heartbeat, StepFinished
from mpwatch.hub import Hub, Outgoing
from mpwatch.numbered import decoded
from mpwatch.queries import Changes, Send, SendReply, Steps, View, reply_decoder
from mpwatch.record import Record
from mpwatch.store import CommandSeen, RunView
from tests.core.test_codec import JUNK
from tests.support.hub_runs import RUN, frame, step

T0 = 1_800_000_000.0
FIELDS = sorted({name for kind in KINDS.values() for name in kind.__struct_fields__})


class Bench:
    """A hub with peers that speak in values and a clock that stands still unless moved."""

    def __init__(self, record: Record) -> None:
        self.hub = Hub(RUN, record)
        self.now = T0
        self.hub.start(1, self.now)

    def from_agent(self, *frames: bytes, identity: bytes = b"agent") -> list[Outgoing]:
        parts = wire.message(wire.EVENTS, codec.encode_batch(frames))
        return self.hub.on_agent_message(identity, parts, self.now)

    def say(self, first: int, *told: Event, identity: bytes = b"agent", **place: Any) -> list[Any]:
        """Send events with sequence numbers from `first`; the commands that come back."""
        frames = [frame(event, first + n, **place) for n, event in enumerate(told)]
        return [order(out) for out in self.from_agent(*frames, identity=identity)]

    def ask(self, query: Any) -> tuple[Any, list[Any]]:
        parts = wire.message(wire.QUERY, msgspec.msgpack.encode(query))
        *orders, reply = self.hub.on_watch_message(b"watcher", parts, self.now)
        assert not reply.to_agent
        assert reply.parts[:3] == [b"watcher", wire.MAGIC, wire.REPLY]
        return reply_decoder.decode(reply.parts[3]), [order(out) for out in orders]

    def send(self, command: Command, id: str = "c1") -> tuple[SendReply, list[Any]]:
        raw = msgspec.Raw(msgspec.msgpack.encode(command))
        reply, orders = self.ask(Send(id=1, request=CommandRequest(id=id, command=raw)))
        assert isinstance(reply, SendReply)
        return reply, orders

    def tick(self, later_s: float = 0.0) -> None:
        """Let time go by in small ticks, as the loop does."""
        end = self.now + later_s
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.hub.tick(self.now)
        self.hub.tick(self.now)

    @property
    def view(self) -> RunView:
        view: RunView = self.ask(View(id=1))[0].view
        return view

    def command(self, id: str = "c1") -> CommandSeen:
        return next(seen for seen in self.view.commands if seen.id == id)

    def history(self) -> list[Event]:
        found: list[Event] = []
        after = 0
        while True:
            reply, _ = self.ask(Changes(id=1, after=after, limit=5000))
            found += [event for _, _, event in decoded((c, bytes(f)) for c, f in reply.frames)]
            after = reply.cursor
            if after == reply.newest:
                return found


def order(out: Outgoing) -> tuple[bytes, str, str]:
    """Who is told to do what, under which id."""
    assert out.to_agent
    identity, *parts = out.parts
    request = msgspec.msgpack.decode(wire.open_message(parts, wire.COMMAND), type=CommandRequest)
    return identity, msgspec.msgpack.decode(request.command)["command"], request.id


def bound(pid: int = 10, **fields: Any) -> AgentBound:
    return AgentBound(pid=pid, process_start_time=1, **fields)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Record(None, RUN))
    yield bench
    bench.hub.finish(bench.now)


# --- what is taken ------------------------------------------------------------------------


def test_events_are_taken_in_order(bench: Bench) -> None:
    bench.say(0, bound(), step(1), step(2))
    assert [type(event).__name__ for event in bench.history()] == [
        "HubStarted",
        "AgentBound",
        "StepFinished",
        "StepFinished",
    ]
    assert bench.view.steps == 2


def test_a_repeated_or_late_frame_is_dropped_and_counted(bench: Bench) -> None:
    bench.say(0, bound(), step(1), step(2))
    bench.say(1, step(1), step(2))
    view = bench.view
    assert (view.steps, view.applied, view.missing_frames) == (2, 2, 0)
    assert view.rejected == {"duplicate": 2}


def test_a_gap_is_said_with_its_size_and_rank(bench: Bench) -> None:
    bench.say(0, bound(), rank=3)
    bench.say(5, step(5), rank=3)
    assert bench.view.missing_frames == 4
    gap = next(event for event in bench.history() if isinstance(event, events.FramesMissing))
    assert (gap.count, gap.of_rank) == (4, 3)


def test_frames_before_the_hub_came_are_missing(bench: Bench) -> None:
    bench.say(100, step(7))
    assert bench.view.missing_frames == 100


def test_another_process_of_a_rank_counts_anew(bench: Bench) -> None:
    bench.say(0, bound(10), step(1), step(2))
    bench.say(0, bound(11, process=1), step(3))
    view = bench.view
    assert (view.steps, view.missing_frames, view.rejected) == (3, 0, {})


def test_a_new_attempt_counts_anew_and_the_old_one_is_late(bench: Bench) -> None:
    bench.say(0, bound(), step(1), step(2))
    bench.say(0, bound(11), step(1), attempt=2)
    bench.say(3, step(3))
    view = bench.view
    assert (view.steps, view.superseded, view.rejected) == (1, 2, {"duplicate": 1})


def test_an_unknown_kind_is_counted_and_is_no_gap(bench: Bench) -> None:
    strange = msgspec.msgpack.encode([PROTOCOL, RUN, 1, 0, 1, T0, {"kind": "moon_landed"}])
    bench.say(0, bound())
    bench.from_agent(strange)
    bench.say(2, step(1))
    view = bench.view
    assert (view.rejected, view.missing_frames, view.steps) == ({"unknown": 1}, 0, 1)


@pytest.mark.parametrize(
    ("data", "category"),
    [
        (frame(step(1), 0, run="another"), "foreign"),
        (msgspec.msgpack.encode([2000, RUN, 1, 0, 0, T0, {"kind": "heartbeat"}]), "version"),
        (msgspec.msgpack.encode([PROTOCOL, RUN, 1, 0, 0, T0, {"kind": "heartbeat", "paused": 3}]),
         "malformed"),
        (msgspec.msgpack.encode([PROTOCOL, RUN, 1, -1, 0, T0, {"kind": "heartbeat"}]), "malformed"),
        (msgspec.msgpack.encode([PROTOCOL, RUN, 1, 0, 0, float("nan"), {"kind": "heartbeat"}]),
         "malformed"),
        (frame(step(2**62), 0), "malformed"),
        (frame(step(1, samples=2**63), 0), "malformed"),
        (frame(step(1, optimizer=64), 0), "malformed"),
        (frame(bound(2**40), 0), "malformed"),
        (frame(events.JobExited(exit_code=0), 0), "malformed"),
        (frame(events.CommandRequested(id="x", command="pause"), 0), "malformed"),
        (frame(events.CommandApplied(id="x" * 1000, command="pause", step=1), 0), "malformed"),
        (b"\x90" + b"x" * (codec.MAX_FRAME_BYTES + 1), "malformed"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_counted_by_category(
    bench: Bench, data: bytes, category: str
) -> None:
    bench.from_agent(data)
    view = bench.view
    assert set(view.rejected) == {category}
    assert (view.steps, view.commands, view.attempts) == (0, (), ())


def test_an_oversized_frame_is_counted(bench: Bench) -> None:
    bench.from_agent(frame(events.HookDisabled(hook="x", error="y" * codec.MAX_FRAME_BYTES), 0))
    assert bench.view.rejected == {"oversized": 1}


def test_one_bad_frame_does_not_cost_its_batch(bench: Bench) -> None:
    bench.from_agent(frame(step(1), 0), b"\x93\x01\x02\x03", frame(step(2), 1))
    assert (bench.view.steps, bench.view.rejected) == (2, {"malformed": 1})


def test_a_fault_in_the_fold_costs_one_event(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise ZeroDivisionError("boom")

    told: list[Exception] = []
    bench.hub.trouble = told.append
    monkeypatch.setitem(fold._HANDLERS, Heartbeat, boom)
    bench.say(0, step(1), Heartbeat(), step(2))
    view = bench.view
    assert (view.steps, view.rejected) == (2, {"failed": 1})
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert len(bench.history()) == 4


def test_each_socket_takes_only_its_own_kind_of_message(bench: Bench) -> None:
    query = wire.message(wire.QUERY, msgspec.msgpack.encode(View(id=1)))
    batch = wire.message(wire.EVENTS, codec.encode_batch([frame(step(1), 0)]))
    order = wire.message(wire.COMMAND, b"x")
    for parts in (query, order):
        assert bench.hub.on_agent_message(b"agent", parts, bench.now) == []
    for parts in (batch, order):
        assert bench.hub.on_watch_message(b"watcher", parts, bench.now) == []
    assert (bench.view.steps, bench.view.rejected) == (0, {"unknown": 4})


def test_many_made_up_ranks_do_not_fill_the_memory(bench: Bench) -> None:
    for rank in range(6000):
        bench.say(0, Heartbeat(), rank=rank)
    assert len(bench.view.ranks) == 4096
    assert bench.view.rejected == {"malformed": 6000 - 4096}


# --- rubbish ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(max_size=80) | JUNK.map(msgspec.msgpack.encode), max_size=5), st.booleans()
)
def test_rubbish_on_either_socket_is_survived(parts: list[bytes], framed: bool) -> None:
    bench = Bench(Record(None, RUN))
    kinds = (wire.EVENTS, wire.QUERY)
    messages = [wire.message(kind, part) for kind in kinds for part in parts] if framed else [parts]
    for message in messages:
        bench.hub.on_agent_message(b"x", message, bench.now)
        bench.hub.on_watch_message(b"x", message, bench.now)
        bench.from_agent(*message)
    assert bench.view.cursor >= 1
    bench.hub.finish(bench.now)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(
        st.sampled_from(FIELDS),
        JUNK | st.integers(-(2**63), 2**64 - 1) | st.floats(),
        max_size=6,
    ),
    st.integers(-2, 5),
)  # fmt: skip
def test_events_with_odd_values_are_survived(kind: str, fields: dict[str, Any], rank: int) -> None:
    bench = Bench(Record(None, RUN))
    body = {"step": 1, "applied": True, "pid": 1, "process_start_time": None, **fields}
    for sequence in range(3):
        bench.from_agent(
            msgspec.msgpack.encode([PROTOCOL, RUN, 1, rank, sequence, T0, {**body, "kind": kind}])
        )
    view = bench.view
    assert "failed" not in view.rejected
    bench.ask(Steps(id=1))
    bench.hub.finish(bench.now)
    assert bench.hub.record.error is None


def test_a_hundred_thousand_random_frames_are_survived(bench: Bench) -> None:
    dice = random.Random(6)
    good = [frame(event, n) for n, event in enumerate([bound(), step(1), Heartbeat()])]
    sent = 0
    while sent < 100_000:
        batch = []
        for _ in range(250):
            data = bytearray(dice.choice(good) if dice.random() < 0.7 else dice.randbytes(40))
            for _ in range(dice.randint(0, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            batch.append(bytes(data))
        sent += len(batch)
        payload = b"\xdc" + len(batch).to_bytes(2, "big") + b"".join(batch)
        bench.hub.on_agent_message(b"a", wire.message(wire.EVENTS, payload), bench.now)
        for data in batch:
            bench.hub.on_agent_message(b"a", wire.message(wire.EVENTS, b"\x91" + data), bench.now)
            bench.hub.on_watch_message(b"w", wire.message(wire.QUERY, data), bench.now)
    view = bench.view
    assert view.rejected["malformed"] > 100_000
    assert "failed" not in view.rejected
    bench.say(0, step(77), attempt=10**6)  # newer than any attempt the dice made up
    assert bench.view.steps == 77


# --- answers ------------------------------------------------------------------------------


def test_changes_come_in_pieces_without_gap_or_duplicate(bench: Bench) -> None:
    bench.say(0, *(step(n) for n in range(1, 1001)))
    after, cursors = 0, []
    while True:
        reply, _ = bench.ask(Changes(id=1, after=after, limit=37))
        cursors += [cursor for cursor, _ in reply.frames]
        after = reply.cursor
        if after == reply.newest:
            break
    assert cursors == list(range(1, 1002))


def test_what_is_handed_out_is_in_the_record_already(tmp_path: Path) -> None:
    path = tmp_path / "record.sqlite"
    bench = Bench(Record(path, RUN))
    bench.say(0, step(1))
    reply, _ = bench.ask(Changes(id=1))
    copy = Record(path, RUN)
    assert copy.newest == reply.newest == 2
    copy.close(T0)
    bench.hub.finish(T0)


def test_a_busy_watcher_does_not_force_a_commit_for_each_question(tmp_path: Path) -> None:
    bench = Bench(Record(tmp_path / "record.sqlite", RUN))
    bench.say(0, step(1))
    bench.ask(Changes(id=1))
    bench.say(1, step(2))
    assert bench.ask(Changes(id=2))[0].newest == 2
    bench.now += hub.COMMIT_GAP_S * 2
    assert bench.ask(Changes(id=3))[0].newest == 3
    bench.hub.finish(T0)


def test_a_reply_stays_below_the_size_of_a_message(bench: Bench) -> None:
    large = events.HookDisabled(hook="h", error="x" * 900_000)
    bench.say(0, *([large] * 8))
    reply, _ = bench.ask(Changes(id=1, limit=5000))
    assert 0 < len(msgspec.msgpack.encode(reply)) < codec.MAX_MESSAGE_BYTES
    assert reply.cursor < reply.newest


def test_odd_questions_are_answered(bench: Bench) -> None:
    bench.say(0, step(1))
    for query in (
        Changes(id=1, after=-5, limit=-1),
        Changes(id=1, after=2**62, limit=2**62),
        Steps(id=1, first=-(2**62), last=-1, points=-3),
        Steps(id=1, first=2**62, last=None, points=2**62),
        Steps(id=1, first=1, last=2**63 - 1, points=0),
    ):
        reply, _ = bench.ask(query)
        assert type(reply).__name__ in {"ChangesReply", "StepsReply"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["say", "poll", "tick", "crash"]), st.integers(0, 400)),
        max_size=40,
    )
)
def test_watchers_see_one_history_whatever_happens_to_hubs(ops: list[tuple[str, int]]) -> None:
    """Also when a hub is killed with events that nobody has committed or been told of."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record.sqlite"
        bench = Bench(Record(path, RUN))
        sequence = 0
        seen: list[list[tuple[int, bytes]]] = [[], [], []]

        def poll(watcher: int, limit: int) -> bool:
            told = seen[watcher]
            after = told[-1][0] if told else 0
            reply, _ = bench.ask(Changes(id=1, after=after, limit=limit))
            told += [(cursor, bytes(data)) for cursor, data in reply.frames]
            return bool(reply.frames)

        for op, number in [*ops, ("tick", 0)]:
            bench.now += 0.001 * number
            if op == "say":
                bench.say(sequence, *(step(sequence + n + 1) for n in range(number)))
                sequence += number
            elif op == "poll":
                poll(number % 3, number)
            elif op == "tick":
                bench.tick(1.0)
            else:
                bench.hub.record._disconnect()
                now, bench = bench.now, Bench(Record(path, RUN))
                bench.now = max(now, T0)
        bench.now += 1.0
        for watcher in range(3):
            while poll(watcher, 99):
                pass
        assert seen[0] == seen[1] == seen[2]
        assert [cursor for cursor, _ in seen[0]] == list(range(1, len(seen[0]) + 1))
        bench.hub.finish(bench.now)


# --- commands -----------------------------------------------------------------------------


def test_a_command_goes_to_every_agent_and_has_one_outcome(bench: Bench) -> None:
    bench.say(0, bound(10), identity=b"zero")
    bench.say(0, bound(11), identity=b"one", rank=1)
    reply, orders = bench.send(Pause(stay=True))
    assert reply.accepted
    assert orders == [(b"zero", "pause", "c1"), (b"one", "pause", "c1")]
    bench.say(1, events.CommandApplied(id="c1", command="pause", step=4), identity=b"zero")
    assert bench.command().outcome is None
    bench.say(1, events.CommandApplied(id="c1", command="pause", step=5), identity=b"one", rank=1)
    seen = bench.command()
    assert (seen.outcome, seen.step, seen.args, seen.by) == ("applied", 5, {"stay": True}, "person")


def test_a_command_waits_for_an_agent_to_show_up(bench: Bench) -> None:
    assert bench.send(Pause())[1] == []
    assert bench.say(0, bound()) == [(b"agent", "pause", "c1")]
    assert bench.say(1, step(1)) == []


def test_a_repeated_id_is_accepted_again_and_not_run_twice(bench: Bench) -> None:
    bench.say(0, bound())
    bench.send(Pause())
    reply, orders = bench.send(Pause())
    assert (reply.accepted, orders) == (True, [])
    bench.say(1, events.CommandApplied(id="c1", command="pause", step=0))
    reply, orders = bench.send(Pause())
    assert (reply.accepted, orders) == (True, [])
    assert [seen.outcome for seen in bench.view.commands] == ["applied"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"command": "fly"}, "fly"),
        ({"command": "set_sampling"}, "needs grad_norm_every"),
        ({"command": "set_sampling", "grad_norm_every": -1}, "allowed are 0"),
        ({"command": "pause", "forever": True}, "forever"),
        ({}, "command"),
        ("pause", "expected"),
    ],
)
def test_a_bad_command_is_refused_at_once_with_the_reason(
    bench: Bench, body: object, reason: str
) -> None:
    bench.say(0, bound())
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    reply, orders = bench.ask(Send(id=1, request=CommandRequest(id="c1", command=raw)))
    assert (reply.accepted, orders) == (False, [])
    assert reason.lower() in reply.reason.lower()
    assert bench.view.commands == ()


@pytest.mark.parametrize("id", ["", "x" * 101, "a\nb", "\x1b[2J"])
def test_a_bad_request_id_is_refused(bench: Bench, id: str) -> None:
    assert not bench.send(Pause(), id)[0].accepted


def test_too_many_waiting_commands_are_refused(bench: Bench) -> None:
    for n in range(MAX_PENDING):
        assert bench.send(Pause(), f"c{n}")[0].accepted
    assert not bench.send(Pause(), "one more")[0].accepted


def test_an_agent_that_comes_back_is_told_again(bench: Bench) -> None:
    bench.say(0, bound())
    bench.send(StopAtBoundary())
    bench.hub.desk.lost(b"agent")
    assert bench.say(1, step(1), identity=b"again") == [(b"again", "stop_at_boundary", "c1")]


def test_after_the_job_ended_a_command_is_refused_at_once(bench: Bench) -> None:
    bench.hub.job_started(events.JobStarted(pid=10), 1, T0, T0)
    bench.say(0, bound())
    bench.send(SetSampling(memory_every=5), "waits")
    bench.hub.job_exited(events.JobExited(exit_code=0), 1, T0)
    assert bench.command("waits").outcome == "refused"
    reply, _ = bench.send(Pause(), "late")
    assert (reply.accepted, reply.reason) == (False, "the job has ended")


def test_a_command_that_waits_when_the_hub_ends_is_refused(tmp_path: Path) -> None:
    bench = Bench(Record(tmp_path / "r", RUN))
    bench.send(Pause())
    bench.hub.finish(T0)
    again = Record(tmp_path / "r", RUN)
    assert [seen.outcome for seen in again.view().commands] == ["refused"]
    again.close(T0)


def test_a_command_outlives_a_hub_that_ends_before_the_job(tmp_path: Path) -> None:
    bench = Bench(Record(tmp_path / "r", RUN))
    bench.send(Pause())
    bench.hub.finish(T0, over=False)
    again = Bench(Record(tmp_path / "r", RUN))
    assert again.say(0, bound()) == [(b"agent", "pause", "c1")]
    again.hub.finish(T0)


def test_a_new_hub_hands_on_what_its_predecessor_could_not(tmp_path: Path) -> None:
    first = Bench(Record(tmp_path / "r", RUN))
    first.say(0, bound())
    first.send(SetSampling(grad_norm_every=7))
    first.tick(1.0)  # committed; then the hub is killed
    second = Bench(Record(tmp_path / "r", RUN))
    assert second.say(1, step(1)) == [(b"agent", "set_sampling", "c1")]
    assert second.view.missing_frames == 0
    hubs = [each for each in second.history() if isinstance(each, events.HubStarted)]
    assert [each.resumed_after for each in hubs] == [0, 3]
    second.hub.finish(T0)
    first.hub.record._disconnect()


# --- keeper and silence -------------------------------------------------------------------


def test_a_keepers_file_that_is_read_again_tells_nothing_new(bench: Bench) -> None:
    for _ in range(2):
        bench.hub.job_started(events.JobStarted(pid=10), 1, T0, T0)
        bench.hub.job_exited(events.JobExited(exit_code=3), 1, T0)
        bench.hub.job_started(events.JobStarted(pid=11), 2, T0, T0)
    assert [(a.n, a.pid, a.exit_code) for a in bench.view.attempts] == [(1, 10, 3), (2, 11, None)]


def test_silence_is_a_stall_and_its_end_is_told(bench: Bench) -> None:
    bench.say(0, bound(), step(1))
    bench.tick(29.0)
    assert not bench.view.stalled
    bench.tick(3.0)
    assert bench.view.stalled
    bench.say(2, step(2))
    assert not bench.view.stalled
    kinds = [type(event).__name__ for event in bench.history()]
    assert kinds.count("JobStalled") == kinds.count("JobRecovered") == 1


def test_slow_steps_are_no_stall(bench: Bench) -> None:
    bench.say(0, bound(), *(step(n, duration_s=60.0) for n in range(1, 5)))
    bench.tick(590.0)
    assert not bench.view.stalled
    bench.tick(20.0)
    assert bench.view.stalled


def test_heartbeats_of_a_paused_job_are_no_silence(bench: Bench) -> None:
    bench.say(0, bound(), events.TrainingPaused(step=1))
    for n in range(10):
        bench.tick(20.0)
        bench.say(2 + n, Heartbeat())
    assert (bench.view.stalled, bench.view.paused) == (False, True)


def test_before_binding_and_after_the_end_silence_is_no_stall(bench: Bench) -> None:
    bench.hub.job_started(events.JobStarted(pid=10), 1, T0, T0)
    bench.tick(100.0)
    assert not bench.view.stalled
    bench.say(0, bound(), step(1), events.AgentExited(steps=1))
    bench.tick(100.0)
    assert not bench.view.stalled


def test_a_hub_that_was_stopped_itself_calls_nobody_stalled(bench: Bench) -> None:
    bench.say(0, bound(), step(1))
    bench.tick(1.0)
    bench.now += 3600.0
    bench.hub.tick(bench.now)
    assert not bench.view.stalled


def test_steps_are_the_type_they_were(bench: Bench) -> None:
    told = step(1, losses=(1.0, None), phase_s={"forward": 0.5})
    bench.say(0, told)
    assert [e for e in bench.history() if isinstance(e, StepFinished)] == [told]
