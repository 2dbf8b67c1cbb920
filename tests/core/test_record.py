"""The record: everything comes back, whatever happens to its writer, its disk or its file."""

import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import codec, record, record_file, record_schema, rollups
from mpwatch.errors import RecordUnreadable
from mpwatch.events import Event, Heartbeat, HubStarted
from mpwatch.fold import Fold
from mpwatch.numbered import decoded
from mpwatch.record import Record
from mpwatch.record_schema import file_system_of
from mpwatch.recorded import Reader
from tests.support.hub_runs import ROOT, RUN, frame, step


class Writer:
    """A record with a clock of its own; `tell` numbers events as a hub does."""

    def __init__(self, path: Path | None) -> None:
        self.record = Record(path, RUN)
        self.sequence = 0
        self.now = 1000.0

    def tell(self, *events: Event, attempt: int = 1, rank: int = 0) -> None:
        for event in events:
            encoded = frame(event, self.sequence, attempt=attempt, rank=rank)
            self.sequence += 1
            self.record.append(encoded, codec.decode_frame(encoded), event)

    def commit(self) -> bool:
        self.now += 1.0
        return self.record.commit(self.now)

    def close(self) -> None:
        self.record.close(self.now)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


def events_of(path: Path) -> list[tuple[int, Event]]:
    reader = Reader(path)
    try:
        found, after = [], 0
        while frames := reader.frames_after(after, 997):
            found += [(cursor, event) for cursor, _, event in decoded(frames)]
            after = frames[-1][0]
        return found
    finally:
        reader.close()


# --- what is written comes back -----------------------------------------------------------


def test_every_event_comes_back_under_its_cursor(writer: Writer, path: Path) -> None:
    told = [step(n) for n in range(1, 1201)]
    for first in range(0, 1200, 37):
        writer.tell(*told[first : first + 37])
        writer.commit()
    assert events_of(path) == list(enumerate(told, 1))


def test_the_open_chunk_is_one_row_until_it_is_full(writer: Writer, path: Path) -> None:
    for n in range(1, 601):
        writer.tell(step(n))
        writer.commit()
    rows = sqlite3.connect(path).execute("SELECT first_cursor, last_cursor FROM chunks").fetchall()
    assert rows == [(1, 250), (251, 500), (501, 600)]


def test_a_reader_beside_the_writer_sees_what_was_committed(writer: Writer, path: Path) -> None:
    writer.tell(step(1))
    writer.commit()
    writer.tell(step(2))
    assert len(events_of(path)) == 1
    writer.commit()
    assert len(events_of(path)) == 2


def test_a_second_writer_continues_fold_and_cursors(path: Path) -> None:
    first = Writer(path)
    first.tell(step(1), step(2, applied=False))
    first.commit()
    history = first.record.history
    first.close()
    second = Writer(path)
    assert (second.record.newest, second.record.history) == (2, history)
    second.tell(step(3))
    second.close()
    reader = Reader(path)
    view = reader.view()
    reader.close()
    assert (view.cursor, view.steps, view.applied, view.skipped) == (3, 3, 2, 1)
    assert [cursor for cursor, _ in events_of(path)] == [1, 2, 3]


def test_the_saved_fold_is_the_fold_of_the_saved_events(writer: Writer, path: Path) -> None:
    dice = random.Random(5)
    for n in range(1, 700):
        writer.tell(step(n, loss=dice.random(), phase_s={"forward": dice.random()}))
    writer.commit()
    fold = Fold()
    reader = Reader(path)
    for cursor, envelope, event in decoded(reader.frames_after(0, 10_000)):
        fold.apply(cursor, envelope, event)
    assert repr(fold.view()) == repr(reader.view())
    reader.close()


def test_the_table_of_steps_is_plain(writer: Writer, path: Path) -> None:
    writer.tell(
        step(1, loss=math.nan, grad_norm=math.inf, loss_scale_before=65536.0, overflow=True),
        step(2, samples=None, learning_rates=(0.1, 0.2)),
    )
    writer.tell(step(1), rank=3)
    writer.commit()
    rows = sqlite3.connect(path).execute(
        "SELECT rank, step, applied, overflow, loss, nan_flags, grad_norm, loss_scale,"
        " learning_rate, samples FROM steps"
    )
    assert rows.fetchall() == [
        (0, 1, 1, 1, None, 1, math.inf, 65536.0, None, 8),
        (0, 2, 1, None, 0.5, 0, None, None, 0.1, None),
        (3, 1, 1, None, 1.0, 0, None, None, None, 8),
    ]


def test_the_record_is_one_plain_file_when_its_writer_has_closed_it(path: Path) -> None:
    writer = Writer(path)
    writer.tell(step(1))
    writer.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_step_weighs_no_more_than_its_budget(path: Path) -> None:
    from benchmarks.ingest import BYTES_PER_STEP_BUDGET, realistic_step

    writer, dice = Writer(path), random.Random(1)
    for n in range(1, 5001):
        writer.tell(realistic_step(n, dice))
        if n % 20 == 0:
            writer.commit()
    writer.close()
    assert path.stat().st_size / 5000 <= BYTES_PER_STEP_BUDGET


# --- zoom ---------------------------------------------------------------------------------


def expected(losses: dict[int, float], first: int, last: int, width: int) -> list[tuple[int, int]]:
    groups: dict[int, list[int]] = {}
    for n in losses:
        if first <= n <= last:
            groups.setdefault((n - first) // width, []).append(n)
    return [(group[0], len(group)) for group in groups.values()]


@pytest.mark.parametrize("first_step", [1, 777])
def test_points_agree_with_the_steps_they_stand_for(writer: Writer, first_step: int) -> None:
    dice = random.Random(2)
    last_step = first_step + 45_000
    losses = {n: dice.random() for n in range(first_step, last_step + 1)}
    for n, loss in losses.items():
        writer.tell(step(n, loss=loss, applied=n % 7 > 0, loss_scale_before=float(n)))
        if n % 5000 == 0:
            writer.commit()
    writer.commit()
    for first, last, points in [
        (1, None, 100),
        (1, None, 1000),
        (20_011, 20_500, 1000),
        (3, 44_998, 40),
        (1, None, 1),
    ]:
        found, width = writer.record.steps(first, last, points)
        begin, end = max(first, first_step), min(last or last_step, last_step)
        assert 1 <= len(found) <= points
        assert sum(point.count for point in found) == end - begin + 1
        for point in found:
            group = range(point.first_step, point.first_step + point.count)
            assert point.count <= width
            assert point.loss_min == min(losses[n] for n in group)
            assert point.loss_max == max(losses[n] for n in group)
            assert point.loss_mean == pytest.approx(
                math.fsum(losses[n] for n in group) / point.count
            )
            assert point.skipped == sum(n % 7 == 0 for n in group)
            assert (point.loss_scale_min, point.loss_scale_last) == (group[0], group[-1])


def test_the_large_spans_are_rolled_up_and_used(writer: Writer, path: Path) -> None:
    for n in range(1, 61_500):
        writer.tell(step(n, loss=float(n)))
        if n % 5000 == 0:
            writer.commit()
    writer.commit()
    rows = sqlite3.connect(path).execute(
        "SELECT span, count(*), sum(count) FROM rollups GROUP BY 1"
    )
    assert rows.fetchall() == [(50, 1229, 61_450), (1000, 61, 61_000), (30_000, 2, 60_000)]
    points, width = writer.record.steps(1, None, 2)
    assert (len(points), width) == (2, 60_000)
    assert sum(point.count for point in points) == 61_499
    assert points[-1].loss_scale_last is None
    assert points[-1].loss_max == 61_499.0


def test_superseded_steps_leave_the_history_and_stay_in_the_table(
    writer: Writer, path: Path
) -> None:
    for n in range(1, 2101):
        writer.tell(step(n, loss=1.0))
    writer.commit()
    # Both attempts in one commit as well, and twice over.
    for n in range(1051, 1200):
        writer.tell(step(n, loss=2.0), attempt=2)
    for n in range(1100, 2201):
        writer.tell(step(n, loss=3.0), attempt=3)
    writer.commit()
    points, _ = writer.record.steps(1, None, 5000)
    assert [point.first_step for point in points] == list(range(1, 2201))
    assert [point.loss_mean for point in points] == [1.0] * 1050 + [2.0] * 49 + [3.0] * 1101
    superseded = sqlite3.connect(path).execute("SELECT sum(superseded), count(*) FROM steps")
    assert superseded.fetchone() == (1050 + 100, 2100 + 149 + 1101)
    again = sqlite3.connect(":memory:", isolation_level=None)
    sqlite3.connect(path).backup(again)
    kept = again.execute("SELECT * FROM rollups ORDER BY span, first_step").fetchall()
    again.execute("DELETE FROM rollups")
    rollups.roll_up(again, rollups.rolled_up_to(again))
    assert again.execute("SELECT * FROM rollups ORDER BY span, first_step").fetchall() == kept


def test_nan_is_told_from_unknown_and_does_not_hide_its_neighbours(writer: Writer) -> None:
    writer.tell(
        step(1, loss=math.nan), step(2, loss=None), step(3, loss=2.0), step(4, loss=math.inf)
    )
    writer.commit()
    single, _ = writer.record.steps(1, None, 10)
    assert math.isnan(single[0].loss_mean or 0)
    assert single[1].loss_mean is None
    assert (single[3].loss_mean, single[3].loss_max) == (None, math.inf)
    together = writer.record.steps(1, None, 1)[0][0]
    assert (together.loss_min, together.loss_mean, together.loss_max) == (2.0, 2.0, math.inf)


def test_a_hole_in_the_steps_does_not_stop_the_roll_ups(writer: Writer) -> None:
    writer.tell(step(1), step(10**12), step(10**12 + 5000))
    assert writer.commit()
    assert sum(point.count for point in writer.record.steps(1, None, 10)[0]) == 3


# --- the disk -----------------------------------------------------------------------------


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
from tests.core.test_record import Writer, step

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
from tests.core.test_record import Writer, step

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
from tests.core.test_record import Writer, step

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


# --- no file ------------------------------------------------------------------------------


def test_in_memory_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "KEPT_EVENTS_IN_MEMORY", 3000)
    monkeypatch.setattr(record, "RECENT_EVENTS", 500)
    writer = Writer(None)
    for n in range(1, 10_001):
        writer.tell(step(n))
        if n % 100 == 0:
            writer.commit()
    frames = writer.record.frames_after(0, 5000)
    assert frames[0][0] > 1
    assert 10_000 - frames[0][0] >= 2999
    assert writer.record.view().steps == 10_000
    assert writer.record.steps(9000, None, 100)[0][-1].first_step > 9900
    assert writer.record.frames_after(9_990, 50)[-1][0] == 10_000
    writer.close()


# --- damage -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed record of 20 000 steps that do not compress well."""
    path = tmp_path_factory.mktemp("sound") / "record.sqlite"
    writer, dice = Writer(path), random.Random(4)
    writer.tell(HubStarted(pid=1))
    for n in range(1, 20_001):
        losses = tuple(dice.random() for _ in range(4))
        writer.tell(step(n, losses=losses, loss=losses[0]))
        if n % 1000 == 0:
            writer.commit()
    writer.close()
    return path


@pytest.fixture
def copied(sound: Path, path: Path) -> Path:
    shutil.copyfile(sound, path)
    return path


def test_a_record_that_was_cut_gives_what_is_left(copied: Path) -> None:
    os.truncate(copied, copied.stat().st_size * 6 // 10)
    reader = Reader(copied)
    assert reader.damage is not None
    assert "damaged" in reader.damage
    assert "\n" not in reader.damage
    view = reader.view()
    points, _ = reader.steps(1, None, 100)
    reader.close()
    found = events_of(copied)
    assert 0.4 * 20_000 < len(found) < 20_000
    assert view.steps > 8000
    assert sum(point.count for point in points) > 8000


def test_pages_of_garbage_cost_only_what_was_on_them(copied: Path) -> None:
    pages = copied.stat().st_size // 4096
    with copied.open("r+b") as file:
        for page in (pages // 3, pages // 2):
            file.seek(page * 4096)
            file.write(os.urandom(4096))
    found = events_of(copied)
    assert len(found) > 0.9 * 20_000
    reader = Reader(copied)
    assert reader.view().steps > 18_000
    assert sum(point.count for point in reader.steps(1, None, 100)[0]) > 18_000
    reader.close()


@pytest.mark.parametrize("place", range(1, 30, 4))
def test_garbage_anywhere_at_the_front_never_raises_anything_else(copied: Path, place: int) -> None:
    with copied.open("r+b") as file:
        file.seek(place * 4096)
        file.write(b"\xff" * 4096)
    try:
        assert len(events_of(copied)) >= 0
        reader = Reader(copied)
    except RecordUnreadable:
        return  # one line, by its class
    else:
        assert reader.view().steps >= 0
        reader.steps(1, None, 10)
        reader.close()


def test_no_database_is_said_in_one_line(path: Path) -> None:
    path.write_bytes(b"this is a text, and longer than a header of SQLite would be..." * 100)
    with pytest.raises(RecordUnreadable, match="no record"):
        Reader(path)


def test_another_database_is_said_in_one_line(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (x)")
    connection.commit()
    connection.close()
    with pytest.raises(RecordUnreadable, match="no record of mpwatch"):
        Reader(path)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0"])
def test_an_empty_or_tiny_file_is_said_in_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(RecordUnreadable):
        Reader(path)


def test_a_missing_record_is_said_in_one_line(path: Path) -> None:
    with pytest.raises(RecordUnreadable, match=f"no record at {path}"):
        Reader(path)


def test_a_newer_format_is_said_and_left_alone(copied: Path) -> None:
    connection = sqlite3.connect(copied)
    connection.execute(f"PRAGMA user_version = {record_schema.FORMAT + 1}")
    connection.close()
    before = copied.read_bytes()
    with pytest.raises(RecordUnreadable, match="newer mpwatch"):
        Reader(copied)
    with pytest.raises(RecordUnreadable, match="format"):
        Record(copied, RUN)
    assert copied.read_bytes() == before


def test_another_runs_record_is_not_written_to(copied: Path) -> None:
    with pytest.raises(RecordUnreadable, match=f"run {RUN}"):
        Record(copied, "another")


def test_a_fold_that_was_not_kept_is_folded_anew(copied: Path) -> None:
    whole = Reader(copied).view()
    connection = sqlite3.connect(copied)
    connection.execute("UPDATE fold SET state = x'00'")
    connection.commit()
    connection.close()
    reader = Reader(copied)
    assert repr(reader.view()) == repr(whole)
    reader.close()


def test_kinds_of_a_newer_version_are_passed_over(writer: Writer, path: Path) -> None:
    body = {"kind": "moon_landed", "step": 1}
    import msgspec

    strange = msgspec.msgpack.encode([codec.PROTOCOL, RUN, 1, 0, 1, 1.0, body])
    writer.tell(step(1))
    writer.record.append(strange, codec.decode_frame(strange), Heartbeat())
    writer.tell(step(2))
    writer.commit()
    assert [cursor for cursor, _ in events_of(path)] == [1, 3]


def test_a_killed_writers_record_in_a_directory_of_somebody_else(path: Path) -> None:
    """-wal without -shm, where the reader may not make one: read from a copy."""
    writer = Writer(path)
    writer.tell(*(step(n) for n in range(1, 301)))
    writer.commit()
    place = path.parent / "theirs"
    place.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copyfile(path.parent / name, place / name)
    writer.close()
    script = """
import os, sys
from pathlib import Path
from mpwatch.recorded import Reader
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
reader = Reader(Path(sys.argv[1]))
print(reader.view().steps, len(reader.frames_after(0, 1000)))
reader.close()
"""
    for file in place.iterdir():
        file.chmod(0o444)
    place.chmod(0o555)
    for parent in place.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", script, str(place / path.name)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    place.chmod(0o755)
    assert (done.stdout, done.stderr) == ("300 300\n", "")
