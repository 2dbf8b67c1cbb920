"""Hubs as processes: one at a time, replaceable, deaf to rubbish, gone when the job is."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import codec, rendezvous, wire
from mpwatch.client import LiveJob
from mpwatch.events import (
    CommandApplied,
    FramesMissing,
    HubStarted,
    JobExited,
    JobStarted,
    OutputLine,
    StepFinished,
)
from mpwatch.following import follow
from mpwatch.replayed import ReplayedJob
from tests.support.hub_runs import RUN, Run, a_run, me, step, steps_seen, until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "run") as run:
        yield run


def test_a_hub_says_where_it_is_and_leaves_nothing_but_the_record(run: Run) -> None:
    hub = run.start_hub()
    endpoint = json.loads((run.directory / rendezvous.ENDPOINT_FILE).read_text())
    assert endpoint == {
        "pid": hub.pid,
        "start_time": rendezvous.process_start_time(hub.pid),
        "agent": rendezvous.agent_endpoint(run.runtime),
        "watch": rendezvous.watch_endpoint(run.runtime),
        "protocol": codec.PROTOCOL,
    }
    assert (run.runtime / rendezvous.AGENT_SOCKET).stat().st_mode & 0o077 == 0
    run.end()
    assert hub.returncode == 0
    left = {file.name for file in (*run.directory.iterdir(), *run.runtime.iterdir())}
    assert left == {"run.json", "keeper.jsonl", "hub.log", "record.sqlite", "hub.lock"}
    assert (run.directory / "hub.log").read_text() == ""


def test_what_a_script_printed_first_comes_after_its_start(run: Run) -> None:
    run.keeper_says("spawned", attempt=1, **me())
    (run.directory / rendezvous.OUTPUT_LOG).write_text("first\nsecond\n")
    run.start_hub()
    run.end()
    told = [e for _, _, e in follow(run.directory) if isinstance(e, JobStarted | OutputLine)]
    assert [event.text if isinstance(event, OutputLine) else "" for event in told] == [
        "",
        "first",
        "second",
    ]


def test_a_second_hub_leaves_the_first_alone(run: Run) -> None:
    run.start_hub()
    second = run.start_hub(ready=False)
    assert second.wait(20) == 0
    assert "running already" in (run.directory / "hub.log").read_text()
    agent = run.agent()
    agent.steps(1, 3)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 3)


def test_a_killed_hubs_successor_continues_the_record(run: Run) -> None:
    agent = run.agent()
    for generation in range(3):
        hub = run.start_hub()
        if generation == 0:
            agent.bind()
        agent.steps(1 + 100 * generation, 100 + 100 * generation)
        with LiveJob(run.directory) as job:
            until(lambda j=job, g=generation: steps_seen(j) == 100 + 100 * g)
        hub.kill()
        hub.wait()
    run.start_hub()
    run.end()
    told = list(follow(run.directory))
    assert [cursor for cursor, _, _ in told] == list(range(1, len(told) + 1))
    assert [e.step for _, _, e in told if isinstance(e, StepFinished)] == list(range(1, 301))
    assert sum(isinstance(event, HubStarted) for _, _, event in told) == 4
    assert not any(isinstance(event, FramesMissing) for _, _, event in told)


def test_what_died_with_a_hub_is_said_to_be_missing(run: Run) -> None:
    agent = run.agent()
    hub = run.start_hub()
    agent.bind()
    agent.steps(1, 10)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 10)
    hub.kill()
    hub.wait()
    agent.sequence += 7
    run.start_hub()
    agent.steps(18, 20)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 20)
        assert job.view().missing_frames == 7


def test_a_stopped_hub_catches_up(run: Run) -> None:
    agent = run.agent()
    hub = run.start_hub()
    hub.send_signal(signal.SIGSTOP)
    agent.bind()
    for first in range(1, 3001, 50):
        agent.steps(first, first + 49)
    hub.send_signal(signal.SIGCONT)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 3000)
        view = job.view()
    assert (view.missing_frames, view.stalled) == (0, False)


def test_sigterm_takes_what_was_sent_and_closes_the_record(run: Run) -> None:
    agent = run.agent()
    hub = run.start_hub()
    agent.bind()
    agent.steps(1, 1)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 1)
    agent.steps(2, 500)
    run.keeper_says("exited", code=3, signal=None, attempt=1)
    hub.terminate()
    assert hub.wait(20) == 0
    with ReplayedJob(run.record) as replay:
        view = replay.view()
    assert view.steps == 500
    assert [attempt.exit_code for attempt in view.attempts] == [3]
    assert not run.record.with_name("record.sqlite-wal").exists()


def test_the_jobs_end_comes_after_the_last_thing_it_said(run: Run) -> None:
    run.keeper_says("spawned", pid=os.getpid(), start_time=me()["start_time"], attempt=1)
    run.start_hub()
    agent = run.agent()
    agent.bind()
    agent.steps(1, 2000)
    run.end(code=137)
    told = [event for _, _, event in follow(run.directory)]
    assert isinstance(told[-1], JobExited)
    assert told[-1].exit_code == 137
    assert sum(isinstance(event, StepFinished) for event in told) == 2000


def test_signals_meant_for_the_script_do_not_end_a_hub(run: Run) -> None:
    hub = run.start_hub()
    hub.send_signal(signal.SIGINT)
    hub.send_signal(signal.SIGHUP)
    agent = run.agent()
    agent.steps(1, 1)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 1)


def test_a_hub_ends_when_keeper_and_ranks_are_gone(run: Run) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    script = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = rendezvous.process_start_time(keeper.pid)
    run_file = {"run_id": RUN, "keeper": {"pid": keeper.pid, "start_time": started}}
    rendezvous.write_json(run.directory / "run.json", run_file)
    hub = run.start_hub()
    agent = run.agent()
    agent.bind(script.pid)
    agent.steps(1, 1)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 1)
        keeper.communicate()
        agent.steps(2, 2)
        until(lambda: steps_seen(job) == 2)
        assert hub.poll() is None
    script.communicate()
    assert hub.wait(20) == 0
    with ReplayedJob(run.record) as replay:
        assert replay.view().steps == 2


def test_an_endpoint_file_that_cannot_be_written_stops_nothing(run: Run) -> None:
    (run.directory / rendezvous.ENDPOINT_FILE).mkdir()
    run.start_hub()
    run.agent().steps(1, 2)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 2)
    assert "cannot write endpoint.json" in (run.directory / "hub.log").read_text()


def test_a_record_that_is_none_is_left_alone_and_said(run: Run) -> None:
    run.record.write_bytes(b"precious, and no database at all" * 500)
    run.start_hub()
    run.agent().steps(1, 2)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 2)
        assert "no record" in (job.view().record_error or "")
    run.end()
    assert run.record.read_bytes() == b"precious, and no database at all" * 500
    assert (run.directory / "hub.log").read_text().count("goes on without one") == 1


def test_rubbish_on_the_sockets_is_counted_and_survived(run: Run) -> None:
    run.start_hub()
    dice = random.Random(8)
    for name in (rendezvous.AGENT_SOCKET, rendezvous.WATCH_SOCKET):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(run.runtime / name))
                raw.sendall(dice.randbytes(dice.randint(1, 3000)))
    agent = run.agent()
    for _ in range(1000):
        parts = [dice.randbytes(dice.randint(0, 60)) for _ in range(dice.randint(1, 4))]
        agent.socket.send_multipart(parts)
        junk = [dice.randbytes(dice.randint(0, 60)) for _ in range(20)]
        payload = b"\xdc\x00\x14" + b"".join(b"\xc4" + bytes([len(j)]) + j for j in junk)
        agent.socket.send_multipart(wire.message(wire.EVENTS, payload))
    agent.steps(1, 5)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 5)
        job._socket.send_multipart([b"", b"x"])
        job._socket.send_multipart(wire.message(wire.QUERY, b"\xc1"))
        rejected = job.view().rejected
    assert rejected["malformed"] >= 20_000
    assert "failed" not in rejected
    assert (run.directory / "hub.log").read_text() == ""


def test_commands_reach_the_agent_and_their_outcome_the_watcher(run: Run) -> None:
    from mpwatch.commands import SetSampling

    run.start_hub()
    agent = run.agent()
    agent.bind()
    with LiveJob(run.directory) as job:
        id = job.send(SetSampling(memory_every=3), by="controller")
        heard = agent.hear()
        assert (heard["id"], heard["by"]) == (id, "controller")
        assert heard["command"] == {"command": "set_sampling", "memory_every": 3}
        agent.say(CommandApplied(id=id, command="set_sampling", step=9))
        seen = job.outcome(id, 10.0)
    assert (seen.outcome, seen.step, seen.args) == ("applied", 9, {"memory_every": 3})


def test_a_command_survives_the_hub_that_took_it(run: Run) -> None:
    from mpwatch.commands import Pause

    hub = run.start_hub()
    with LiveJob(run.directory) as job:
        id = job.send(Pause())
        job.view()
        hub.kill()
        hub.wait()
        run.start_hub()
        agent = run.agent()
        agent.bind()
        assert agent.hear()["id"] == id
        agent.say(CommandApplied(id=id, command="pause", step=0))
        assert job.outcome(id, 10.0).outcome == "applied"


def test_the_system_is_sampled(run: Run) -> None:
    run.keeper_says("spawned", pid=os.getpid(), start_time=me()["start_time"], attempt=1)
    run.start_hub()
    with LiveJob(run.directory) as job:
        system = until(lambda: job.view().system)
    assert system.memory_total_bytes > system.memory_used_bytes > 0
    assert system.job_resident_bytes > 1_000_000
    assert system.job_processes >= 1
    assert system.disk_free_bytes > 0


def test_two_ranks_are_told_apart(run: Run) -> None:
    run.start_hub()
    first, second = run.agent(0), run.agent(1)
    for agent in (first, second):
        agent.bind()
    first.steps(1, 3)
    second.steps(1, 5)
    with LiveJob(run.directory) as job:
        until(lambda: [rank.steps for rank in job.view().ranks] == [3, 5])
        assert job.view().steps == 3


def test_a_step_that_came_is_in_the_record_soon(run: Run) -> None:
    run.start_hub()
    run.agent().say(step(1))

    def recorded() -> bool:
        with ReplayedJob(run.record) as replay:
            return replay.view().steps == 1

    until(recorded, seconds=5.0)
