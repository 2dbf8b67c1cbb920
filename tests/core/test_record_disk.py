"""Disks that are remote, full or gone slow, and writers that are killed: told once, got over."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpwatch import record_file
from mpwatch.record_schema import file_system_of
from mpwatch.recorded import Reader
from tests.support.hub_runs import ROOT, step
from tests.support.hub_writer import Writer, events_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sqlite"


MOUNTS = """
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/me/local\\040disk rw shared:1 - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/tmp/x/record.sqlite", "ext4"),
        ("/home/me/record.sqlite", "nfs4"),
        ("/homestead/record.sqlite", "ext4"),
        ("/home/me/local disk/record.sqlite", "xfs"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount(place: str, kind: str) -> None:
    assert file_system_of(Path(place), MOUNTS) == kind


def test_on_a_network_file_system_there_is_no_wal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "wal_is_safe", lambda path: False)
    writer = Writer(path)
    writer.tell(step(1))
    writer.commit()
    assert {file.name for file in path.parent.iterdir()} == {path.name}
    reader = Reader(path)
    assert reader.meta["journal"] == "delete"
    assert reader.view().steps == 1
    reader.close()
    writer.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
from mpwatch import record
from tests.support.hub_runs import step
from tests.support.hub_writer import Writer

record.MAX_WAITING_EVENTS, record.RECENT_EVENTS = 2000, 500
path = Path(sys.argv[1])
writer = Writer(path)
writer.tell(*(step(n) for n in range(1, 101)))
assert writer.commit()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
for n in range(101, 6001):
    writer.tell(step(n, loss=n * 0.123456789))
    writer.record.commit_if_due(writer.now)
    writer.now += 0.01
assert writer.record.error, "the limit was never met"
view = writer.record.view()
assert view.record_error and view.steps == 6000
assert writer.record.frames_after(5900, 500)[-1][0] == 6000
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.now += 6
writer.tell(step(6001))
writer.record.commit_if_due(writer.now)
assert writer.record.error is None
writer.close()
"""


def run_child(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_full_disk_is_told_once_counted_and_got_over(path: Path) -> None:
    done = run_child(FULL_DISK, path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert done.stderr.count("is written again") == 1
    reader = Reader(path)
    view = reader.view()
    reader.close()
    assert view.steps == 6001
    assert view.record_dropped > 0
    assert view.record_error is None
    cursors = [cursor for cursor, _ in events_of(path)]
    assert len(cursors) == 6001 - view.record_dropped
    assert cursors[-1] == 6001
    assert cursors == sorted(set(cursors))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_file_system_leaves_a_readable_record(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)])
    if mounted.returncode:
        pytest.skip("no right to mount here")
    try:
        writer = Writer(place / "record.sqlite")
        dice = random.Random(1)
        for n in range(1, 8001):
            writer.tell(step(n, losses=(dice.random(),) * 9, loss=dice.random()))
            if n % 50 == 0:
                writer.commit()
        assert writer.record.error
        assert "full" in writer.record.error
        found = events_of(place / "record.sqlite")
        assert [cursor for cursor, _ in found] == list(range(1, len(found) + 1))
        assert len(found) > 100
        writer.close()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


FULL_FROM_THE_START = """
import resource, sys
from pathlib import Path
from tests.support.hub_runs import step
from tests.support.hub_writer import Writer

soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
writer = Writer(Path(sys.argv[1]))
writer.tell(*(step(n) for n in range(1, 301)))
assert not writer.commit()
assert writer.record.view().record_error
assert len(writer.record.frames_after(0, 1000)) == 300
assert writer.record.steps(1, None, 10) == ([], 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
history = writer.record.history
writer.now += 6
assert writer.commit()
assert writer.record.history == history
writer.close()
"""


def test_a_disk_that_is_full_from_the_start_is_tried_again(path: Path) -> None:
    done = run_child(FULL_FROM_THE_START, path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert [cursor for cursor, _ in events_of(path)] == list(range(1, 301))


KILLED = """
import sys
from pathlib import Path
from tests.support.hub_runs import step
from tests.support.hub_writer import Writer

writer = Writer(Path(sys.argv[1]))
n = 0
while True:
    writer.tell(*(step(n + k) for k in range(1, 51)))
    n += 50
    assert writer.commit()
    print(n, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_committed(path: Path) -> None:
    for _ in range(3):
        path.unlink(missing_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        told = 0
        while told < 2000:
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        told = max([told, *(int(line) for line in child.stdout.read().split())])
        child.wait()
        child.stdout.close()
        found = events_of(path)
        assert len(found) >= told
        assert [cursor for cursor, _ in found] == list(range(1, len(found) + 1))
        assert len(found) % 50 == 0
        Writer(path).close()
