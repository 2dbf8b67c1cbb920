"""The hub without sockets: what it takes, counts and answers, and what it calls a stall."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch import codec, events, fold, hub, wire
from mpwatch.codec import PROTOCOL
from mpwatch.events import Heartbeat, StepFinished
from mpwatch.queries import Changes, Steps, View
from mpwatch.record import Record
from tests.support.hub_bench import T0, Bench, bound
from tests.support.hub_runs import RUN, frame, step


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Record(None, RUN))
    yield bench
    bench.hub.finish(bench.now)


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


def test_a_process_that_takes_a_rank_over_leaves_no_gap(bench: Bench) -> None:
    bench.say(0, bound(10), step(1), step(2))
    bench.say(100_003, bound(11, process=1), step(3))
    assert (bench.view.steps, bench.view.missing_frames, bench.view.rejected) == (3, 0, {})
    bench.say(100_006, step(4))
    assert bench.view.missing_frames == 1


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


def test_how_long_a_silence_is_a_stall_can_be_set(bench: Bench) -> None:
    bench.hub.stall_after_s = 50.0
    bench.say(0, bound(), step(1))
    bench.tick(49.0)
    assert not bench.view.stalled
    bench.tick(4.0)
    assert bench.view.stalled
