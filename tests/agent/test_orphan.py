"""When nobody reads the terminal any more: what was printed is saved, all else is left alone.

With a real keeper killed: `tests/faults/test_detached.py`.
"""

import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import rendezvous
from mpwatch_agent.orphan import LOOK_EVERY_S, Orphan, orphan_of

GONE = [2**22 + 1, 1]  # above the largest process id there can be


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    yield master, slave
    os.close(master)
    os.close(slave)


def orphan(tmp_path: Path, hold: int, slave: int, readers: list[list[int]]) -> Orphan:
    output = {
        "log": str(tmp_path / "output.log"),
        "hold": hold,
        "device": os.fstat(slave).st_rdev,
        "readers": readers,
    }
    found = orphan_of({"output": output})
    assert found is not None
    return found


def test_what_nobody_has_read_goes_to_the_log_before_the_line_that_says_so(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    master, slave = terminal
    os.write(slave, b"printed before")
    watching = orphan(tmp_path, master, slave, [GONE, GONE])
    watching.look(1.0)
    os.write(slave, b"printed by a worker since")
    watching.look(1.1)
    lines = (tmp_path / "output.log").read_bytes()
    assert lines.startswith(b"printed beforempwatch: ")
    assert lines.endswith(b"\nprinted by a worker since")
    assert (tmp_path / "output.log").stat().st_mode & 0o777 == 0o600


def test_while_somebody_reads_nothing_is_touched(tmp_path: Path, terminal: tuple[int, int]) -> None:
    master, slave = terminal
    os.write(slave, b"printed before")
    me = os.getpid()
    started = rendezvous.process_start_time(me)
    assert started is not None
    watching = orphan(tmp_path, master, slave, [GONE, [me, started]])
    for look in range(5):
        watching.look(look * LOOK_EVERY_S)
    assert not (tmp_path / "output.log").exists()
    assert os.read(master, 100) == b"printed before"


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    """The script closed what it did not know, and opened a file of its own at that number."""
    _, slave = terminal
    (tmp_path / "data").write_bytes(b"the script's own data")
    own = os.open(tmp_path / "data", os.O_RDONLY)
    other_master, other_slave = pty.openpty()
    os.set_blocking(other_master, False)
    os.write(other_slave, b"another terminal")
    before = [os.fstat(number) for number in (1, 2)]
    for hold in (own, other_master, 10_000):
        orphan(tmp_path, hold, slave, [GONE]).look(1.0)
    assert os.read(own, 100) == b"the script's own data"
    assert os.read(other_master, 100) == b"another terminal"
    assert [os.fstat(number).st_ino for number in (1, 2)] == [found.st_ino for found in before]
    for descriptor in (own, other_master, other_slave):
        os.close(descriptor)


@pytest.mark.parametrize("output", [None, {}, {"log": 1}, {"log": "x", "hold": "y"}, [1]])
def test_what_this_version_does_not_understand_is_no_lookout(output: object) -> None:
    assert orphan_of({"output": output}) is None
