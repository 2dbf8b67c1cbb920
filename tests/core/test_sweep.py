"""Runtime directories of runs that ended long ago go; whatever may be in use stays."""

import os
import time
from pathlib import Path

from mpwatch import rendezvous
from mpwatch.cli.sweep import KEPT_S, REMOVED_AT_MOST, sweep

LONG_AGO = time.time() - KEPT_S - 60


def runtime(root: Path, name: str, *files: str, at: float = LONG_AGO) -> Path:
    directory = root / name
    directory.mkdir(0o700)
    for file in files:
        (directory / file).touch()
        os.utime(directory / file, (at, at))
    os.utime(directory, (at, at))
    return directory


def test_what_ended_runs_left_goes_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(0o755)
    runtime(root, "00000000000a", "hub.lock", "rank-1-0", "rank-2-15", "watch.sock", "agent.sock")
    runtime(root, "00000000000b")
    stay = [
        runtime(root, "00000000000c", "hub.lock", "rank-1-0", at=time.time()),
        runtime(root, "00000000000d", "hub.lock"),
        runtime(root, "00000000000e", "hub.lock", "rank-1-0"),
        runtime(root, "00000000000f", "hub.lock", "notes"),
        runtime(root, "20261130-120000-ab12", "hub.lock"),
        runtime(root, "000000000010", "hub.lock", "rank-1-0"),
    ]
    elsewhere = runtime(tmp_path, "00000000000a", "hub.lock")
    (root / "000000000011").symlink_to(elsewhere)
    # A hub, a process that trains; one whose counters were written a moment ago.
    locks = [rendezvous.try_lock(stay[1] / "hub.lock"), rendezvous.try_lock(stay[2] / "rank-1-0")]
    os.utime(stay[5] / "rank-1-0")
    assert sweep(root) == 0  # others can write there
    root.chmod(0o700)
    assert sweep(root) == 2
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [*(path.name for path in stay), "000000000011"]
    )
    assert (elsewhere / "hub.lock").exists()
    for descriptor in locks:
        assert descriptor is not None
        os.close(descriptor)
    # When they are let go of, they go too.
    assert sweep(root) == 2
    assert sweep(tmp_path / "nowhere") == 0


def test_a_start_does_not_wait_for_thousands_of_them(tmp_path: Path) -> None:
    for number in range(REMOVED_AT_MOST + 10):
        runtime(tmp_path, f"{number:012x}", "hub.lock")
    assert sweep(tmp_path) == REMOVED_AT_MOST
    assert sweep(tmp_path) == 10
