"""Records that were cut, overwritten, or are none: what is readable is read, the rest is said."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mpwatch import codec, record_schema
from mpwatch.errors import RecordUnreadable
from mpwatch.events import Heartbeat, HubStarted
from mpwatch.record import Record
from mpwatch.recorded import Reader
from tests.support.hub_runs import ROOT, RUN, step
from tests.support.hub_writer import Writer, events_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


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
