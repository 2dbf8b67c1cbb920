"""Runs are found by every name a person may use, and their state follows from the files alone."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpwatch import rendezvous, runs
from mpwatch.cli.main import main
from mpwatch.cli.revive import ensure_hub
from mpwatch.client import open_job
from mpwatch.codec import decode_frame, encode_frame
from mpwatch.errors import NoAnswer, RunNotFound
from mpwatch.events import AgentBound, AgentExited, AgentStopping, Event, StepFinished
from mpwatch.glance import evidence_of, glance
from mpwatch.live import job_is_over, out_of_reach
from mpwatch.record import Record
from mpwatch.run_state import Attempt, Evidence, attempts_of, cause_of, ended_state, live_state
from mpwatch.stopping import stop_now

BOUND = Evidence(bound=True, steps=10)


# --- states of ended runs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "evidence", "state"),
    [
        ({"exit_code": 0}, BOUND, "finished"),
        ({"exit_code": 0}, Evidence(), "finished"),
        ({"exit_code": 0}, Evidence(bound=False), "never_trained"),
        ({"exit_code": 0}, BOUND._replace(stopping="stop_at_boundary"), "stopped"),
        ({"exit_code": 0}, BOUND._replace(stopping="max_steps"), "finished"),
        ({"exit_code": 1}, BOUND, "crashed"),
        ({"exit_code": 1}, Evidence(bound=False), "crashed"),
        ({"exit_code": 1}, BOUND._replace(error_type="OutOfMemoryError", error="x"), "oom"),
        (
            {"exit_code": 1},
            BOUND._replace(
                error_type="RuntimeError", error="[x] DefaultCPUAllocator: can't allocate memory"
            ),
            "oom",
        ),
        ({"exit_code": 1}, BOUND._replace(error_type="RuntimeError", error="shape"), "crashed"),
        ({"exit_code": 130, "signal": "SIGINT"}, BOUND, "stopped"),
        ({"exit_code": 130}, BOUND, "stopped"),
        ({"exit_code": 143, "signal": "SIGTERM"}, BOUND, "preempted"),
        ({"exit_code": 129, "signal": "SIGHUP"}, BOUND, "preempted"),
        ({"exit_code": 1, "cause": "signalled", "by": "SIGTERM"}, BOUND, "preempted"),
        ({"exit_code": 0, "cause": "signalled", "by": "SIGTERM"}, BOUND, "finished"),
        ({"exit_code": 1, "cause": "signalled", "by": "SIGINT"}, BOUND, "stopped"),
        (
            {"exit_code": 1, "cause": "signalled", "by": "SIGINT"},
            BOUND._replace(error_type="ValueError", error="while cleaning up"),
            "crashed",
        ),
        ({"exit_code": 137, "signal": "SIGKILL"}, BOUND, "killed"),
        ({"exit_code": 137, "signal": "SIGKILL", "cause": "oom_kill"}, BOUND, "oom"),
        ({"exit_code": 139, "signal": "SIGSEGV"}, BOUND, "crashed"),
        ({"exit_code": 137, "signal": "SIGKILL", "cause": "stop_now"}, BOUND, "stopped"),
        ({"exit_code": 127, "cause": "not_started"}, Evidence(bound=False), "crashed"),
        (
            {"exit_code": 143, "signal": "SIGTERM"},
            BOUND._replace(stopping="max_steps"),
            "finished",
        ),
    ],
)
def test_state_of_an_ended_run(attempt: dict[str, Any], evidence: Evidence, state: str) -> None:
    assert ended_state(Attempt(1, ended=True, **attempt), evidence) == state


def test_state_of_a_live_run() -> None:
    assert live_state(Evidence(bound=False)) == "starting"
    assert live_state(Evidence(bound=None)) == "running"
    assert live_state(BOUND) == "running"
    assert live_state(BOUND._replace(stalled=True)) == "stalled"
    assert live_state(BOUND._replace(stalled=True, paused=True)) == "paused"


def test_causes_are_words() -> None:
    def cause(evidence: Evidence = BOUND, **fields: Any) -> str | None:
        return cause_of(Attempt(1, ended=True, **fields), evidence, last=True)

    assert cause(exit_code=0) is None
    assert cause(exit_code=0, evidence=BOUND._replace(stopping="max_steps")) == "max_steps"
    assert cause(exit_code=9) == "exit code 9"
    assert cause(exit_code=143, signal="SIGTERM") == "died of SIGTERM"
    assert cause(exit_code=1, cause="signalled", by="SIGTERM") == "exit code 1 after SIGTERM"
    failed = BOUND._replace(error_type="ValueError", error="bad")
    assert cause(exit_code=1, evidence=failed) == "ValueError: bad"
    assert cause_of(Attempt(1), BOUND, last=True) is None


def test_attempts_pass_over_what_makes_no_sense() -> None:
    entries = [
        {"event": "spawned", "pid": 5, "start_time": 7, "attempt": 1, "time": 1.0},
        {"event": "exited", "code": 1, "signal": None, "attempt": 1, "time": 2.0},
        {"event": "spawned", "pid": "x", "attempt": 2, "time": "y"},
        {"event": "exited", "attempt": None},
        {"no": "event"},
        {"event": "hub_started", "pid": 9},
    ]
    first, second = attempts_of(entries)
    assert (first.pid, first.exit_code, first.ended_at) == (5, 1, 2.0)
    assert (second.n, second.pid, second.started_at, second.ended) == (2, None, None, False)


# --- from files -----------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs directory; the runtime root is empty."""
    monkeypatch.setattr(rendezvous, "runtime_root", lambda: tmp_path / "runtime")
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def make_run(
    directory: Path, run_id: str, *entries: dict[str, Any], name: str | None = None, **info: Any
) -> Path:
    path = directory / run_id
    path.mkdir()
    # Alive: this test itself is the keeper.
    keeper = {"pid": os.getpid(), "start_time": rendezvous.process_start_time(os.getpid())}
    written = {
        "run_id": run_id,
        "name": name,
        "started_at": float(len(list(directory.iterdir()))),
        "host": os.uname().nodename,
        "keeper": keeper,
        "watched": True,
        **info,
    }
    (path / "run.json").write_text(json.dumps(written))
    (path / "keeper.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return path


DEAD = {"pid": 2**22 + 1, "start_time": 1}
SPAWNED = {"event": "spawned", "attempt": 1, "time": 1.0, **DEAD}
EXITED = {"event": "exited", "code": 0, "signal": None, "attempt": 1, "time": 2.0}
ENDED = {"event": "ended", "time": 2.0}


def state(directory: Path, run_id: str) -> str:
    run = runs.find(run_id, directory)
    return runs.state_of(run, runs.with_agent_files(run, None))


def test_liveness_decides_where_the_keeper_wrote_no_end(directory: Path) -> None:
    make_run(directory, "a-starting")
    make_run(directory, "b-lost", SPAWNED, keeper=DEAD)
    make_run(directory, "c-never-spawned", keeper=DEAD)
    me = {"pid": os.getpid(), "start_time": rendezvous.process_start_time(os.getpid())}
    make_run(directory, "d-keeper-gone", {**SPAWNED, **me}, keeper=DEAD)
    make_run(directory, "e-pid-reused", {**SPAWNED, **me, "start_time": 1}, keeper=DEAD)
    make_run(directory, "f-ended", SPAWNED, EXITED, ENDED)
    states = {run.run_id[0]: state(directory, run.run_id) for run in runs.list_runs(directory)}
    expected = {"a": "starting", "b": "lost", "c": "lost", "d": "running", "e": "lost"}
    assert states == {**expected, "f": "finished"}


def test_the_agents_files_tell_who_bound_when_no_record_does(directory: Path) -> None:
    runtime = directory.parent / "sockets"
    runtime.mkdir()
    make_run(directory, "r", SPAWNED, EXITED, ENDED, runtime_directory=str(runtime))
    assert state(directory, "r") == "never_trained"
    (runtime / "rank-1-0").touch()
    assert state(directory, "r") == "finished"


def test_an_unwatched_run_never_trained(directory: Path) -> None:
    make_run(directory, "r", SPAWNED, EXITED, ENDED, watched=False)
    assert state(directory, "r") == "never_trained"


def test_a_job_of_another_machine_is_judged_by_its_files(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(directory, "r", SPAWNED, host="elsewhere", keeper=DEAD)
    assert state(directory, "r") == "running"
    assert not job_is_over(path)
    assert out_of_reach(path) == "the job runs on elsewhere"
    # Its pids mean nothing here, even where they are alive.
    assert stop_now(path) == "the job runs on elsewhere; it can be stopped only there"
    assert main(["ctl", str(path), "pause"]) == 3
    assert "the job runs on elsewhere: it takes no commands from here" in capsys.readouterr().err
    ensure_hub(path)
    assert sorted(file.name for file in path.iterdir()) == ["keeper.jsonl", "run.json"]
    old = time.time() - 1000
    os.utime(path / "keeper.jsonl", (old, old))
    assert state(directory, "r") == "lost"
    assert job_is_over(path)


@pytest.fixture
def readable() -> Iterator[Path]:
    """A directory that other users can look into; pytest's own are private."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


@contextlib.contextmanager
def another_user(*private: Path) -> Iterator[None]:
    """What another user can do: files that are `private` are out of reach."""
    for path in private:
        path.chmod(0 if os.geteuid() else 0o700)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
        for path in private:
            path.chmod(0o700)


def test_a_hub_of_another_user_is_no_lost_hub(readable: Path) -> None:
    runtime = readable / "sockets"
    runtime.mkdir(0o700)
    path = make_run(readable, "r", runtime_directory=str(runtime))
    assert out_of_reach(path) is None
    with another_user(runtime):
        assert out_of_reach(path) == "the hub belongs to another user"
        with pytest.raises(NoAnswer, match="belongs to another user, and there is no record"):
            open_job(path)
    assert out_of_reach(path) is None


def test_a_keeper_that_cannot_be_asked_is_not_gone(readable: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as script:
        started = rendezvous.process_start_time(script.pid)
        path = make_run(readable, "r", {**SPAWNED, "pid": script.pid, "start_time": started})
        (path / "requests.jsonl").symlink_to("elsewhere")  # not followed: it cannot be written
        said = stop_now(path)
        assert script.wait(20) == -signal.SIGTERM
    assert said.startswith("the keeper cannot be asked (")
    end = f"sent SIGTERM to the script (process {script.pid}) from here; no SIGKILL will follow"
    assert said.endswith(f"): {end}")


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800"])
def test_what_can_be_no_path_is_no_runtime_directory(directory: Path, path: str) -> None:
    run = make_run(directory, "r", SPAWNED, keeper=DEAD, runtime_directory=path)
    assert state(directory, "r") == "lost"
    assert rendezvous.runtime_directory(run).parent == rendezvous.runtime_root()
    assert out_of_reach(run) is None
    assert job_is_over(run)


def test_damaged_files_are_passed_over(directory: Path) -> None:
    make_run(directory, "good", SPAWNED, EXITED, ENDED)
    (directory / "empty").mkdir()
    (directory / "garbage").mkdir()
    (directory / "garbage" / "run.json").write_bytes(b"\xff{")
    odd = make_run(directory, "odd", started_at="x", keeper=7, runtime_directory=3, host=None)
    (odd / "keeper.jsonl").write_bytes(
        b'{"event": "spa\n\xff\n[1]\n{"event": ["x"], "attempt": 1}\n'
    )
    assert {run.run_id for run in runs.list_runs(directory)} == {"good", "odd"}
    assert state(directory, "odd") == "lost"


def test_names_of_runs_cannot_command_a_terminal(directory: Path) -> None:
    make_run(directory, "r", name="a\x1b]0;x\x07b\nc")
    assert runs.find("latest", directory).name == "ab c"


# --- which run ------------------------------------------------------------------------------


def test_every_way_to_name_a_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(directory, "2026-aa11", SPAWNED, EXITED, ENDED, name="base")
    newest = make_run(directory, "2026-bb22", SPAWNED, EXITED, ENDED, name="base")
    assert runs.find("2026-a", directory).run_id == "2026-aa11"
    assert runs.find("2026-aa11", directory).run_id == "2026-aa11"
    assert runs.find("base", directory).run_id == "2026-bb22"
    assert runs.find("latest", directory).run_id == "2026-bb22"
    assert runs.find(None, directory).run_id == "2026-bb22"
    assert runs.find(str(newest), directory).run_id == "2026-bb22"
    monkeypatch.chdir(newest)
    assert runs.find(".", directory).run_id == "2026-bb22"


def test_the_only_running_job_is_meant(directory: Path) -> None:
    make_run(directory, "running")
    make_run(directory, "later", SPAWNED, EXITED, ENDED)
    assert runs.find(None, directory).run_id == "running"
    make_run(directory, "too")
    with pytest.raises(RunNotFound, match="2 jobs are running, say which: too, running"):
        runs.find(None, directory)


@pytest.mark.parametrize("name", ["2026", "nowhere", "/nowhere/at/all", "", "\x1b[2J"])
def test_what_names_no_single_run_is_refused(directory: Path, name: str) -> None:
    make_run(directory, "2026-aa11")
    make_run(directory, "2026-bb22")
    with pytest.raises(RunNotFound) as raised:
        runs.find(name, directory)
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_no_runs_at_all(directory: Path) -> None:
    with pytest.raises(RunNotFound, match="no runs in"):
        runs.find("latest", directory)


def test_unrecorded_runs_are_found_in_the_runtime_root(directory: Path) -> None:
    root = directory.parent / "runtime"
    root.mkdir()
    (root / "0123456789ab").mkdir()
    make_run(root, "unrecorded", recorded=False)
    assert runs.find("latest", directory).run_id == "unrecorded"


# --- at a glance ----------------------------------------------------------------------------


def test_a_glance_sees_what_the_whole_view_says(tmp_path: Path) -> None:
    events: list[Event] = [
        AgentBound(pid=1, process_start_time=2),
        *(StepFinished(step=step, applied=True) for step in range(1, 6)),
        AgentStopping(step=5, reason="stop_at_boundary"),
        AgentExited(steps=5, error_type="ValueError", error="bad"),
    ]
    path = tmp_path / "record.sqlite"
    record = Record(path, "r")
    for sequence, event in enumerate(events):
        data = encode_frame(event, run="r", attempt=1, rank=0, sequence=sequence, time=1.0)
        record.append(data, decode_frame(data), event)
    view = record.fold.view()
    record.close(1.0)
    seen = glance(path)
    assert seen == evidence_of(view)
    assert seen is not None
    assert (seen.bound, seen.steps, seen.stopping) == (True, 5, "stop_at_boundary")


def test_a_glance_at_rubbish_sees_nothing(tmp_path: Path) -> None:
    (tmp_path / "record.sqlite").write_bytes(b"no database" * 100)
    assert glance(tmp_path / "record.sqlite") is None
    assert glance(tmp_path / "missing.sqlite") is None
