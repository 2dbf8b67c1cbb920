"""Commands: who is told, what is refused at once, and one outcome whatever happens to hubs."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mpwatch import events
from mpwatch.command_desk import MAX_PENDING
from mpwatch.commands import CommandRequest, Pause, SetSampling, StopAtBoundary
from mpwatch.queries import Send
from mpwatch.record import Record
from tests.support.hub_bench import T0, Bench, bound
from tests.support.hub_runs import RUN, step


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Record(None, RUN))
    yield bench
    bench.hub.finish(bench.now)


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
        ({"command": "set_sampling"}, "needs one of grad_norm_every"),
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
