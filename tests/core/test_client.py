"""Watchers: live, replayed and scripted jobs tell one history, and waiting always ends."""

import itertools
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import client, record
from mpwatch.commands import Pause, StopAtBoundary
from mpwatch.errors import MpwatchError, NoAnswer, RecordUnreadable
from mpwatch.events import AgentBound, Event, StepFinished
from mpwatch.following import follow
from mpwatch.live import JobOver, LiveJob, hub_is_there, job_is_over
from mpwatch.numbered import decoded
from mpwatch.replayed import ReplayedJob
from mpwatch.scripted import ScriptedJob
from tests.support.hub_runs import Run, a_run, frame, step, steps_seen, until

History = list[tuple[int, Event]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "run") as run:
        yield run


def whole(job: client.JobSource) -> History:
    """Everything a source has, asked for in pieces."""
    found: History = []
    after = 0
    while True:
        reply = job.changes(after, 333)
        found += [(c, e) for c, _, e in decoded((c, bytes(f)) for c, f in reply.frames)]
        after = reply.cursor
        if after >= reply.newest:
            return found


def test_live_and_replayed_tell_the_same_history(run: Run) -> None:
    run.start_hub()
    agent = run.agent()
    agent.bind()
    agent.steps(1, 900)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 900)
        live, points = whole(job), job.steps(1, None, 50)
    run.end()
    with ReplayedJob(run.record) as replay:
        recorded = whole(replay)
        assert recorded[: len(live)] == live
        assert replay.steps(1, None, 50).points == points.points
    assert [cursor for cursor, _ in recorded] == list(range(1, len(recorded) + 1))


def test_the_job_is_live_while_its_hub_answers_and_a_record_after(run: Run) -> None:
    run.start_hub()
    agent = run.agent()
    agent.steps(1, 2)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 2)
    source = client.open_job(run.directory)
    assert isinstance(source, LiveJob)
    source.close()
    run.end()
    source = client.open_job(run.directory)
    assert isinstance(source, ReplayedJob)
    assert source.view().steps == 2
    source.close()


def test_without_hub_and_record_there_is_one_clear_error(run: Run) -> None:
    run.keeper_says("ended")
    with pytest.raises(RecordUnreadable, match="no record"):
        client.open_job(run.directory)


def test_a_hub_that_is_only_just_starting_is_waited_for(run: Run) -> None:
    run.start_hub(ready=False)
    source = client.open_job(run.directory, timeout_s=20.0)
    assert isinstance(source, LiveJob)
    source.close()


def test_each_question_has_a_deadline(run: Run) -> None:
    hub = run.start_hub()
    hub.send_signal(signal.SIGSTOP)
    with LiveJob(run.directory, timeout_s=0.3) as job:
        before = time.monotonic()
        with pytest.raises(NoAnswer, match="did not answer"):
            job.view()
        assert time.monotonic() - before < 5.0
        hub.send_signal(signal.SIGCONT)
        job.timeout_s = 20.0
        # Answers to the question that was given up are dropped, not taken for this one's.
        assert job.changes().newest >= 1


def test_a_stopped_hubs_job_is_shown_from_its_record(run: Run) -> None:
    hub = run.start_hub()
    agent = run.agent()
    agent.steps(1, 4)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 4)
    hub.send_signal(signal.SIGSTOP)
    source = client.open_job(run.directory, timeout_s=0.2)
    assert isinstance(source, ReplayedJob)
    assert source.view().steps == 4
    source.close()


def test_a_replaced_hub_is_asked_over_the_same_socket(run: Run) -> None:
    hub = run.start_hub()
    agent = run.agent()
    agent.steps(1, 4)
    with LiveJob(run.directory, timeout_s=20.0) as job:
        until(lambda: steps_seen(job) == 4)
        cursor = job.changes(0, 1000).cursor
        hub.kill()
        hub.wait()
        run.start_hub(ready=False)
        assert job.view().steps == 4
        agent.steps(5, 5)
        until(lambda: steps_seen(job) == 5)
        told = [e for _, _, e in decoded((c, bytes(f)) for c, f in job.changes(cursor).frames)]
        assert [event.step for event in told if isinstance(event, StepFinished)] == [5]


def test_when_the_job_is_over_a_live_source_says_so(run: Run) -> None:
    run.start_hub()
    with LiveJob(run.directory) as job:
        job.view()
        run.end()
        with pytest.raises(JobOver):
            job.view()
    assert not hub_is_there(run.runtime)
    assert job_is_over(run.directory)


def test_a_record_takes_no_commands_and_waits_for_nothing(run: Run) -> None:
    run.start_hub()
    run.end()
    with ReplayedJob(run.record) as replay:
        with pytest.raises(MpwatchError, match="takes no commands"):
            replay.send(Pause())
        with pytest.raises(NoAnswer):
            replay.outcome("unknown", 60.0)


def test_a_command_after_the_end_is_refused_with_the_reason(run: Run) -> None:
    run.start_hub()
    run.keeper_says("exited", code=0, signal=None, attempt=1)
    with LiveJob(run.directory) as job:
        until(lambda: job.view().attempts)
        with pytest.raises(MpwatchError, match="has ended"):
            job.send(StopAtBoundary())


def test_an_outcome_that_does_not_come_is_no_answer(run: Run) -> None:
    run.start_hub()
    with LiveJob(run.directory) as job:
        id = job.send(Pause())
        assert job.send(Pause(), id=id) == id
        with pytest.raises(NoAnswer, match="pause"):
            job.outcome(id, 0.1)


# --- following ----------------------------------------------------------------------------


class Follower(threading.Thread):
    """Follows to the end in a thread of its own; `error` is what ended it early."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.told: History = []
        self.missed = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for cursor, _, event in follow(self.directory, missed=self._miss):
                self.told.append((cursor, event))
        except Exception as error:
            self.error = error

    def _miss(self, count: int) -> None:
        self.missed += count


def test_followers_that_join_at_any_moment_see_the_one_history(run: Run) -> None:
    """Also when hubs are killed under them, and stopped ones go on."""
    dice = random.Random(9)
    hub = run.start_hub()
    agent = run.agent()
    agent.bind()
    followers, number = [], 0
    for turn in range(12):
        followers.append(Follower(run.directory))
        for _ in range(dice.randint(1, 6)):
            count = dice.randint(1, 120)
            agent.steps(number + 1, number + count)
            number += count
        if turn in (3, 7):
            hub.kill()
            hub.wait()
            hub = run.start_hub()
        elif turn == 5:
            hub.send_signal(signal.SIGSTOP)
            agent.steps(number + 1, number + 50)
            number += 50
            hub.send_signal(signal.SIGCONT)
        else:
            with LiveJob(run.directory, 20.0) as job:
                until(lambda j=job, n=number: steps_seen(j) == n)
    run.end()
    for follower in followers:
        follower.join(30)
        assert not follower.is_alive()
        assert follower.error is None
    with ReplayedJob(run.record) as replay:
        recorded = whole(replay)
        assert replay.view().steps == number
    assert [cursor for cursor, _ in recorded] == list(range(1, len(recorded) + 1))
    for follower in followers:
        assert follower.told == recorded
        assert follower.missed == 0


def test_following_goes_on_where_it_was_told_to(run: Run) -> None:
    run.start_hub()
    run.agent().steps(1, 500)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 500)
    run.end()
    everything = list(follow(run.directory))
    assert list(follow(run.directory, after=400)) == everything[400:]
    assert list(follow(run.directory, after=10_000)) == []


def test_following_a_run_without_a_record_that_is_over_is_an_error(run: Run) -> None:
    run.keeper_says("ended")
    with pytest.raises(RecordUnreadable):
        list(follow(run.directory))


def test_a_follower_that_leaves_early_leaves_nothing_behind(run: Run) -> None:
    run.start_hub()
    run.agent().steps(1, 10)
    assert len(list(itertools.islice(follow(run.directory), 5))) == 5


# --- without a record ---------------------------------------------------------------------


def test_without_a_record_a_follower_sees_the_end_and_no_file_is_left(run: Run) -> None:
    run.start_hub("--no-record")
    follower = Follower(run.directory)
    agent = run.agent()
    agent.bind()
    agent.steps(1, 300)
    with LiveJob(run.directory) as job:
        until(lambda: steps_seen(job) == 300)
        assert len(job.steps(1, None, 1000).points) == 300
    run.end()
    follower.join(30)
    assert follower.error is None
    steps = [event.step for _, event in follower.told if isinstance(event, StepFinished)]
    assert steps == list(range(1, 301))
    assert not run.record.exists()


def test_without_a_record_a_replaced_hub_begins_another_history(run: Run) -> None:
    hub = run.start_hub("--no-record")
    agent = run.agent()
    agent.bind()
    agent.steps(1, 50)
    follower = Follower(run.directory)
    until(lambda: len(follower.told) >= 52)
    hub.kill()
    hub.wait()
    run.start_hub("--no-record")
    agent.steps(51, 60)
    until(lambda: any(isinstance(e, StepFinished) and e.step == 60 for _, e in follower.told))
    run.end()
    follower.join(30)
    steps = [event.step for _, event in follower.told if isinstance(event, StepFinished)]
    assert steps == list(range(1, 61))


def test_events_that_were_not_kept_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "KEPT_EVENTS_IN_MEMORY", 1000)
    monkeypatch.setattr(record, "RECENT_EVENTS", 100)
    job = ScriptedJob()
    for first in range(1, 5001, 100):
        job.feed([frame(step(n), n) for n in range(first, first + 100)])
    reply = job.changes(0, 10)
    assert reply.missing > 3000
    assert reply.frames[0][0] == reply.missing + 1
    assert job.changes(reply.cursor, 10).missing == 0
    job.close()


# --- scripted -----------------------------------------------------------------------------


def test_a_scripted_job_tells_what_it_was_fed() -> None:
    with ScriptedJob([frame(AgentBound(pid=1, process_start_time=2), 0), frame(step(1), 1)]) as job:
        assert job.view().steps == 1
        job.feed([frame(step(2), 2)])
        assert job.view().steps == 2
        assert len(job.steps().points) == 2
        id = job.send(Pause(stay=True))
        assert job.sent == [(id, Pause(stay=True))]
        assert [cursor for cursor, _ in whole(job)] == [1, 2, 3]
