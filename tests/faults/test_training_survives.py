"""Whatever happens to the observers, a training ends as plain python ends it.

One loop through every hook (loader, scaler, clip, schedule, evaluation), run plainly once and then
under each misfortune: same stdout (every loss and a hash of the weights), same exit code. Once it
has an interpreter of its own as a person's script has; for the misfortunes it is forked off a
process with torch in it. What a signal does to a script is seen on a real one.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import Place, until
from tests.support.forge import Forge

LOOP = Path(__file__).resolve().parents[1] / "support" / "small_loop.py"
EPOCHS = "6"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> bytes:
    run = forge.run(LOOP, tmp_path_factory.mktemp("plain"), EPOCHS, specification=None)
    assert run.wait() == 0
    stdout, _ = run.communicate()
    assert stdout.count(b"WEIGHTS") == 1
    return stdout


@pytest.fixture
def loop(forge: Forge) -> list[str]:
    """What `mpwatch run` is to run."""
    return [*forge.interpreter, str(LOOP), EPOCHS]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


def ends_as_plain(done: subprocess.CompletedProcess[bytes], plain: bytes, lines: int = 0) -> None:
    assert (done.returncode, done.stdout) == (0, plain)
    assert len(said_on_the_way(done)) == lines, done.stderr


def said_on_the_way(done: subprocess.CompletedProcess[bytes]) -> list[bytes]:
    """Our lines on stderr but those that tell, at the end, of the loop's own overflow."""
    said = done.stderr.splitlines()
    assert all(line.startswith(b"mpwatch: ") for line in said), done.stderr
    at_the_end = (b"mpwatch: 1 overflow located", b"mpwatch:   step 3, micro-batch 0: nan in ")
    return [line for line in said if not line.startswith(at_the_end)]


def show(place: Place) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(place.mpwatch("show", "latest", "--json").stdout)
    return shown


def test_nothing_happens(place: Place, plain: bytes) -> None:
    ends_as_plain(place.mpwatch("run", "--headless", str(LOOP), EPOCHS), plain)
    shown = show(place)
    assert (shown["state"], shown["steps"], shown["script_window"]) == ("finished", 36, 2)
    # Two infinite losses fall into one window each: micro-batches 4 and 5 are window 3.
    assert (shown["applied"], shown["skipped"]) == (35, 1)
    assert (shown["dropped_events"], shown["exit_code"]) == (0, 0)


def test_hub_killed_again_and_again(place: Place, plain: bytes, loop: list[str]) -> None:
    words = ["run", "--headless", "--inject", "hub-kill@step=2..20", *loop]
    ends_as_plain(place.mpwatch(*words), plain)
    shown = show(place)
    assert (shown["state"], shown["exit_code"]) == ("finished", 0)


def test_hub_stopped(place: Place, plain: bytes, loop: list[str]) -> None:
    words = ["run", "--headless", "--inject", "hub-stop@step=2", *loop]
    ends_as_plain(place.mpwatch(*words), plain)
    # It was continued at the end, took what had waited and closed the record.
    shown = show(place)
    assert (shown["state"], shown["steps"]) == ("finished", 36)


def test_a_slow_step_is_only_slow(place: Place, plain: bytes, loop: list[str]) -> None:
    words = ["run", "--headless", "--inject", "slow@step=3", *loop]
    ends_as_plain(place.mpwatch(*words), plain)


def test_hub_never_starts(place: Place, plain: bytes, loop: list[str]) -> None:
    # A package of that name first on the path breaks the hub's imports, not the script's.
    (place.directory / "broken").mkdir()
    (place.directory / "broken" / "psutil.py").write_text("raise ImportError('broken')\n")
    path = os.pathsep.join([str(place.directory / "broken"), place.environment["PYTHONPATH"]])
    done = place.mpwatch("run", "--headless", *loop, environment={"PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (0, plain)
    assert len(said_on_the_way(done)) <= 1


def test_keeper_killed(place: Place, plain: bytes, loop: list[str]) -> None:
    output = place.directory / "output"
    with output.open("wb") as stream:
        keeper = place.start("run", "--headless", *loop, stdout=stream)
        until(lambda: output.read_bytes().count(b"\n") > 3, "some losses")
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.communicate()
        until(lambda: b"WEIGHTS" in output.read_bytes(), "the end of the script")
    assert output.read_bytes() == plain
    until(lambda: not place.processes(), "the end of the hub", 20)
    assert show(place)["state"] == "lost"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_record_on_a_disk_that_fills(place: Place, plain: bytes, loop: list[str]) -> None:
    small = place.directory / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets root mount nothing: {mounted.stderr.decode().strip()}")
    try:
        words = ["run", "--headless", "--runs-dir", str(small), *loop]
        ends_as_plain(place.mpwatch(*words), plain)
        shown = place.mpwatch("show", "latest", "--json", "--runs-dir", str(small))
        assert json.loads(shown.stdout)["exit_code"] == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(4000, 4))
loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1000):
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "number", "code", "state"),
    [
        ("keeper", signal.SIGTERM, 143, "preempted"),
        ("keeper", signal.SIGINT, 130, "stopped"),
        ("script", signal.SIGKILL, 137, "killed"),
    ],
)
def test_signals_while_loader_workers_live(
    place: Place, victim: str, number: signal.Signals, code: int, state: str
) -> None:
    script = place.script(WORKERS)
    output = place.directory / "output"
    with output.open("wb") as stream:
        keeper = place.start("run", "--headless", script, stdout=stream)
        until(lambda: output.read_bytes().count(b"step") > 20, "some steps")
        # A killed script takes the last 200 ms of events with it: wait for some to be recorded.
        until(lambda: show(place)["steps"], "some steps in the record")
        pid = keeper.pid if victim == "keeper" else place.entry("spawned")["pid"]
        os.kill(pid, number)
        keeper.communicate(timeout=60)
    assert keeper.returncode == code
    shown = show(place)
    assert (shown["state"], shown["exit_code"]) == (state, code)
    assert shown["steps"] > 0
    # Workers of a killed main process look for their parent every five seconds.
    until(lambda: not place.processes(), "the end of the workers", 30)
