"""ls, show, tail and ctl on one real training run: live, across a hub's death, and after."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import MPWATCH, Place, until

LOOP = """
import threading, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
wait = threading.Event().wait
while True:
    for micro in range(2):
        (model(torch.randn(4, 8)).pow(2).mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    wait(0.02)
"""

DOCUMENTED = """\
run_id name state exit_code attempts steps applied skipped superseded script_window
multiplier accumulation_steps windows_dropped loss_scale loss grad_norm samples_per_s phase_s
memory_bytes precision scaling overflows
diagnoses commands decisions checkpoints leak dropped_events agent_us_per_step
agent_us_per_step_median locate_us"""


class Job:
    """The run of this module: started once, stopped by the test that stops it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        script = place.script(LOOP)
        self.process = place.start("run", "--headless", "--name", "loop", script)

    def listed(self) -> dict[str, Any]:
        entries = json.loads(self.place.mpwatch("ls", "--json").stdout or b"[]")
        return dict(entries[0]) if entries else {"steps": 0}

    def shown(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.place.mpwatch("show", "--json", *words).stdout)
        return found

    def ctl(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return self.place.mpwatch("ctl", "loop", *words)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    place = Place(tmp_path_factory.mktemp("job"))
    job = Job(place)
    try:
        until(lambda: (job.listed()["steps"] or 0) >= 5, "five steps")
        yield job
    finally:
        if job.process.poll() is None:
            job.process.terminate()
        job.process.communicate(timeout=20)
        place.none_left()


def test_ls_of_a_live_run(job: Job) -> None:
    entry = job.listed()
    assert (entry["name"], entry["state"], entry["exit_code"]) == ("loop", "running", None)
    lines = job.place.mpwatch("ls").stdout.decode().splitlines()
    assert lines[0].split() == ["RUN", "NAME", "STATE", "STEPS", "STARTED", "EXIT"]
    assert lines[1].startswith(f"{entry['run_id']}  loop  running")


def test_show_has_exactly_the_documented_keys(job: Job) -> None:
    shown = job.shown()
    assert " ".join(shown) == " ".join(DOCUMENTED.splitlines())
    assert (shown["state"], shown["script_window"], shown["accumulation_steps"]) == (
        "running",
        2,
        2,
    )
    assert shown["applied"] + shown["skipped"] == shown["steps"] >= 5
    assert shown["phase_s"]["forward"].keys() == {"median", "total"}
    assert shown["memory_bytes"]["forward"].keys() == {"start", "peak", "end", "kind"}
    assert shown["attempts"] == [
        {"n": 1, "started_at": shown["attempts"][0]["started_at"], "exit_code": None, "cause": None}
    ]


def test_show_for_people(job: Job) -> None:
    text = job.place.mpwatch("show", "loop").stdout.decode()
    assert "state        running\n" in text
    assert "window       2 micro-batches (2 of the script x 1)\n" in text
    assert "learning rate 0.125\n" in text


def test_ctl_applied_is_0_and_seen_everywhere(job: Job) -> None:
    done = job.ctl("pause")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"pause applied at step ")
    until(lambda: job.listed()["state"] == "paused", "paused in ls")
    assert job.shown()["state"] == "paused"
    done = job.ctl("unpause", "--json")
    outcome = json.loads(done.stdout)
    assert (outcome["command"], outcome["outcome"], outcome["by"]) == (
        "unpause",
        "applied",
        "person",
    )
    until(lambda: job.listed()["state"] == "running", "running in ls")


def test_ctl_takes_values_in_words(job: Job) -> None:
    assert job.ctl("set_sampling", "grad_norm_every=1", "memory_every=50").returncode == 0
    assert job.ctl("set-sampling", "2").returncode == 0
    commands = job.shown()["commands"]
    assert [c["args"] for c in commands[-2:]] == [
        {"grad_norm_every": 1, "memory_every": 50},
        {"grad_norm_every": 2},
    ]
    assert list(commands[-1]) == ["id", "command", "args", "by", "outcome", "step", "reason"]


def test_tail_prints_one_object_per_line_and_ends_with_its_reader(job: Job) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(MPWATCH)} tail latest --json | head -3"],
        cwd=job.place.directory,
        env=job.place.environment,
        capture_output=True,
        timeout=30,
    )
    assert done.stderr == b""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["cursor"] for event in events] == [1, 2, 3]
    assert all(list(e)[:5] == ["cursor", "time", "attempt", "rank", "kind"] for e in events)


def test_tail_without_following_ends_and_goes_on_from_a_cursor(job: Job) -> None:
    first = [json.loads(x) for x in tail(job, "--no-follow")]
    cursor = first[-1]["cursor"]
    later = [json.loads(x) for x in tail(job, "--no-follow", "--after", str(cursor - 2))]
    assert [event["cursor"] for event in later[:2]] == [cursor - 1, cursor]
    assert b"step_finished" in job.place.mpwatch("tail", "--no-follow").stdout


def tail(job: Job, *words: str) -> list[bytes]:
    done = job.place.mpwatch("tail", "loop", "--json", *words)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.splitlines()


def test_the_end_through_a_hubs_death(job: Job) -> None:
    """A tail begun before the hub died sees everything once, up to the job's own end."""
    follower = job.place.start("tail", "loop", "--json")
    hub = job.place.entry("hub_started")["pid"]
    os.kill(hub, signal.SIGKILL)
    job.place.entry("hub_started", count=2)
    done = job.ctl("stop_at_boundary")
    assert (done.returncode, done.stdout[:32]) == (0, b"stop_at_boundary applied at step")
    job.process.communicate(timeout=20)
    assert job.process.returncode == 0
    output, errors = follower.communicate(timeout=20)
    assert (follower.returncode, errors) == (0, b"")
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["cursor"] for event in events] == list(range(1, len(events) + 1))
    kinds = [event["kind"] for event in events]
    assert kinds.count("hub_started") == 2
    assert kinds[-2:] == ["agent_exited", "job_exited"]
    steps = [event["step"] for event in events if event["kind"] == "step_finished"]
    assert steps == sorted(set(steps))


def test_after_the_end(job: Job) -> None:
    until(lambda: job.process.poll() is not None, "the end")
    shown = job.shown("latest")
    assert (shown["state"], shown["exit_code"]) == ("stopped", 0)
    assert shown["attempts"][0]["cause"] == "stop_at_boundary"
    assert job.listed()["state"] == "stopped"
    assert job.listed()["steps"] == shown["steps"]
    assert b"state        stopped, exit code 0" in job.place.mpwatch("show").stdout
    done = job.ctl("pause")
    assert (done.returncode, done.stderr.decode()) == (
        3,
        f"mpwatch: the run has ended: {shown['run_id']} takes no commands any more; what it did:"
        f" mpwatch show {shown['run_id']}; none is running now\n",
    )
    assert json.loads(tail(job)[-1])["kind"] == "job_exited"


def test_a_record_that_is_gone_or_rubbish(job: Job, tmp_path: Path) -> None:
    """One clear line, and what run.json and the keeper's entries still tell."""
    until(lambda: job.process.poll() is not None, "the end")
    directory = job.place.run()
    for content in (b"rubbish" * 1000, None):
        for leftover in directory.glob("record.sqlite*"):
            leftover.unlink()
        if content is not None:
            (directory / "record.sqlite").write_bytes(content)
        done = job.place.mpwatch("show", "loop", "--json")
        shown = json.loads(done.stdout)
        assert (shown["state"], shown["exit_code"], shown["steps"]) == ("finished", 0, None)
        assert " ".join(shown) == " ".join(DOCUMENTED.splitlines())
        assert done.stderr.startswith(b"mpwatch: ")
        assert done.stderr.count(b"\n") == 1
        done = job.place.mpwatch("tail", "loop")
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
