"""Keeper, hub and script are killed, alone and together: the script's run is its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import rendezvous
from tests.support.cli_runs import Place, keeper_entries, until, until_ready

# Runs until a file appears, so that a test decides when it ends.
UNTIL_TOLD = """
import os, sys, threading
wait = threading.Event().wait
print("ready", flush=True)
while not os.path.exists("go"):
    wait(0.02)
open("done", "w").write("whole")
sys.exit(4)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


class Running:
    """A run whose script waits for `finish`."""

    def __init__(self, place: Place, *options: str) -> None:
        self.place = place
        self.keeper = place.start("run", "--headless", *options, place.script(UNTIL_TOLD))
        self.script = place.entry("spawned")["pid"]
        self.hub = place.entry("hub_started")["pid"]
        assert self.keeper.stdout is not None
        until_ready(self.keeper.stdout.fileno())

    def finish(self) -> int:
        """Let the script end; the keeper's exit code."""
        (self.place.directory / "go").touch()
        self.keeper.communicate(timeout=20)
        return self.keeper.returncode

    def finished_whole(self) -> bool:
        """The script came to its own end."""
        done = self.place.directory / "done"
        return done.exists() and done.read_text() == "whole"


def gone(pid: int) -> bool:
    return not rendezvous.is_alive(pid, None)


def test_keeper_killed_the_script_goes_on(place: Place) -> None:
    running = Running(place)
    running.keeper.kill()
    running.keeper.wait(10)
    assert place.state() in ("starting", "running")
    (place.directory / "go").touch()
    until(running.finished_whole, "the script's own end")
    place.none_left()
    assert place.state() == "lost"


def test_hub_killed_another_takes_over_and_the_script_never_knows(place: Place) -> None:
    running = Running(place)
    os.kill(running.hub, signal.SIGKILL)
    second = place.entry("hub_started", count=2)
    assert second["pid"] != running.hub
    assert place.entry("hub_exited")["signal"] == "SIGKILL"
    assert running.finish() == 4
    assert running.finished_whole()


def test_hub_stopped_does_not_hold_the_end_up(place: Place) -> None:
    running = Running(place)
    until((place.run() / "endpoint.json").exists, "the hub's endpoint")
    os.kill(running.hub, signal.SIGSTOP)
    assert running.finish() == 4
    assert gone(running.hub)


def test_script_killed_the_others_end(place: Place) -> None:
    running = Running(place)
    os.kill(running.script, signal.SIGKILL)
    running.keeper.communicate(timeout=20)
    assert running.keeper.returncode == 137
    assert gone(running.hub)
    assert place.state() == "killed"


@pytest.mark.parametrize("victims", ["keeper hub", "keeper script", "hub script", "all"])
def test_killed_together(place: Place, victims: str) -> None:
    running = Running(place)
    pids = {"keeper": running.keeper.pid, "hub": running.hub, "script": running.script}
    names = list(pids) if victims == "all" else victims.split()
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    running.keeper.wait(20)
    if "script" not in names:
        (place.directory / "go").touch()
        until(running.finished_whole, "the script's own end")
    place.none_left()
    assert place.state() == ("killed" if "keeper" not in names else "lost")


def test_die_with_keeper_ends_the_script(place: Place) -> None:
    running = Running(place, "--die-with-keeper")
    running.keeper.kill()
    until(lambda: gone(running.script), "the script's death")
    place.none_left()
    assert not running.finished_whole()


def test_a_hub_that_cannot_start_is_told_once_and_changes_nothing(place: Place) -> None:
    # The hub imports msgspec; the script does not.
    (place.directory / "broken").mkdir()
    place.script("raise ImportError('broken on purpose')", "broken/msgspec.py")
    broken = os.pathsep.join([str(place.directory / "broken"), place.environment["PYTHONPATH"]])
    place.environment["PYTHONPATH"] = broken
    process = place.start("run", "--headless", place.script(UNTIL_TOLD))
    place.entry("hub_exited", count=3)
    (place.directory / "go").touch()
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (4, b"ready\n")
    assert errors.startswith(b"mpwatch: the hub")
    assert errors.count(b"\n") == 1


def test_ten_at_once(place: Place) -> None:
    script = place.script("import sys; print(sys.argv[1])")
    started = [place.start("run", "--name", f"n{i}", script, str(i)) for i in range(10)]
    for number, process in enumerate(started):
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output, errors) == (0, f"{number}\n".encode(), b"")
    directories = place.runs()
    assert len(directories) == 10
    runtimes = {str(rendezvous.read_json(d / "run.json")["runtime_directory"]) for d in directories}  # type: ignore[index]
    assert len(runtimes) == 10
    assert all(keeper_entries(d)[-1]["event"] in ("ended", "hub_exited") for d in directories)


def test_a_restart_within_a_second(place: Place) -> None:
    script = place.script("print('again')")
    for _ in range(3):
        assert place.mpwatch("run", "--headless", script).stdout == b"again\n"
    assert len(place.runs()) == 3
