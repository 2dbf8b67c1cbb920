"""The keeper's log and the hub's reading of it: nothing twice, and what is missing is counted."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from mpwatch import keeper_output, output_tail
from mpwatch.events import OutputLine
from mpwatch.keeper_files import Journal
from mpwatch.keeper_output import OutputLog
from mpwatch.output_tail import OutputTail


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    """A log of 1000 bytes a file."""
    return OutputLog(str(tmp_path), Journal(str(tmp_path)), limit=1000, own_lines=False)


def line(number: int) -> bytes:
    return f"line {number} of many\n".encode()


def texts(told: list[OutputLine]) -> dict[int, str]:
    return {event.number: event.text for event in told}


def test_log_is_private_bounded_and_whole_over_its_two_files(
    log: OutputLog, tmp_path: Path
) -> None:
    for number in range(200):
        log.write(line(number))
    current, older = tmp_path / "output.log", tmp_path / "output.log.1"
    assert current.stat().st_mode & 0o777 == 0o600
    assert max(current.stat().st_size, older.stat().st_size) <= 1000
    whole = older.read_bytes() + current.read_bytes()
    assert whole == b"".join(map(line, range(200)))[-len(whole) :]


def test_log_knows_whether_it_stands_between_lines(log: OutputLog, tmp_path: Path) -> None:
    seen = [log.between_lines()]
    for data in (b"half a ", b"line\n"):
        log.write(data)
        # Whoever wrote it: a keeper that was killed, say.
        seen.append(
            OutputLog(str(tmp_path), Journal(str(tmp_path)), own_lines=False).between_lines()
        )
    assert seen == [True, False, True]


def test_tail_follows_through_rotations_and_successors_go_on(
    log: OutputLog, tmp_path: Path
) -> None:
    dice, told = random.Random(1), []
    tail = OutputTail(tmp_path)
    for number in range(300):
        log.write(line(number))
        if dice.random() < 0.2:
            told += tail.look(number)
        if dice.random() < 0.05:
            # Killed here: another one goes on behind what was told.
            tail.close()
            tail = OutputTail(tmp_path, told[-1].offset, told[-1].number + 1) if told else tail
    told += tail.look(301, ended=True)
    tail.close()
    assert texts(told) == {n: line(n).decode().strip() for n in range(300)}
    assert [event.number for event in told] == sorted({event.number for event in told})
    assert sum(event.left_out for event in told) == 0


def test_a_hub_that_slept_through_several_files_says_what_is_missing(
    log: OutputLog, tmp_path: Path
) -> None:
    tail, told = OutputTail(tmp_path), []
    for number in range(500):
        log.write(line(number))
        if number in (3, 480):
            told += tail.look(number)
    told += tail.look(501, ended=True)
    tail.close()
    assert texts(told) == {event.number: f"line {event.number} of many" for event in told}
    assert [event.number for event in told][:4] == [0, 1, 2, 3]
    assert told[-1].number == 499
    assert sum(event.left_out for event in told) + len(told) == 500
    # Where the next hub would go on: the same byte for the same line.
    assert all(event.offset == len(b"".join(map(line, range(event.number + 1)))) for event in told)


def test_what_came_too_fast_is_counted_and_the_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(b"".join(map(line, range(300_000))))
    tail = OutputTail(tmp_path)
    told = tail.look(0.0) + tail.look(0.1) + tail.look(0.2, ended=True)
    tail.close()
    assert len(told) <= 600
    assert texts(told) == {event.number: f"line {event.number} of many" for event in told}
    assert told[-1].number == 299_999
    assert sum(event.left_out for event in told) + len(told) == 300_000


def test_a_successor_that_comes_after_the_older_file_is_gone_says_what_is_missing(
    log: OutputLog, tmp_path: Path
) -> None:
    for number in range(500):
        log.write(line(number))
    tail = OutputTail(tmp_path, offset=len(line(0)) * 5, number=5)
    told = tail.look(0.0, ended=True)
    tail.close()
    assert told[-1].number == 499
    assert texts(told) == {event.number: f"line {event.number} of many" for event in told}
    assert told[0].left_out == told[0].number - 5 > 300


def test_bytes_that_cannot_be_written_are_counted(
    log: OutputLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [30]

    def small_disk(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("keeper.jsonl"):
            return real(descriptor, data)
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(keeper_output.os, "write", small_disk)
    for number in range(3):
        log.write(line(number))
    room[0] = 10_000
    log.write(b"room again\n")
    room[0] = 0
    log.write(b"never again\n")
    log.close()
    monkeypatch.undo()
    entries = [json.loads(text) for text in (tmp_path / "keeper.jsonl").read_text().splitlines()]
    lost = len(line(0)) * 3 - 30
    assert [(e["event"], e["bytes"]) for e in entries] == [
        ("output_lost", lost),
        ("output_lost", 12),
    ]
    kept = b"".join(map(line, range(3)))[:30]
    said = f"\nmpwatch: {lost} bytes of output could not be written here\n".encode()
    assert (tmp_path / "output.log").read_bytes() == kept + said + b"room again\n"


BARS = b"".join(b"\r%6d of many |%s" % (n, b"#" * 80) for n in range(200_000))


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"A" * (20 << 20), r"\[207093\d\d bytes left out\] AAAA"),
        (b"first\r" + b"A" * (20 << 20), r"\[207093\d\d bytes left out\] AAAA"),
        (BARS, r"199999 of many \|####"),
        (b"before\n" + BARS, r"199999 of many \|####"),
    ],
    ids=["a long line", "a long line redrawn once", "a bar", "a bar below a line"],
)
def test_an_endless_line_is_passed_over_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bytes, shown: str
) -> None:
    real, read = os.pread, [0]

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        data = real(descriptor, size, offset)
        read[0] += len(data)
        return data

    monkeypatch.setattr(output_tail.os, "pread", counted)
    path, number = tmp_path / "output.log", printed.count(b"\n")
    path.write_bytes(printed)
    # A hub that was started late: it is not far behind after its first looks.
    tail = OutputTail(tmp_path)
    told = tail.look(0.0) + tail.look(2.0)
    assert (told[-1].number, told[-1].unfinished) == (number, True)
    assert re.match(shown, told[-1].text)
    with path.open("ab") as file:
        file.write(b"\nend\n")
    told = tail.look(4.0, ended=True)
    tail.close()
    # One that comes for the end only.
    late = OutputTail(tmp_path)
    also = late.look(0.0, ended=True)
    late.close()
    for lines in (told, also):
        assert [(e.number, e.unfinished) for e in lines[-2:]] == [
            (number, False),
            (number + 1, False),
        ]
        assert re.match(shown, lines[-2].text)
        assert lines[-1].text == "end"
        assert lines[-1].offset == len(printed) + 5
    # Twice: once for each of them, and the end once more.
    assert read[0] < 2 * len(printed) + (4 << 20)


def test_an_endless_line_whose_beginning_is_in_no_file_any_more(
    log: OutputLog, tmp_path: Path
) -> None:
    log.write(line(0))
    for _ in range(50):
        log.write(b"A" * 100)
    tail = OutputTail(tmp_path, offset=len(line(0)), number=1)
    log.write(b"\nend\n")
    told = tail.look(0.0, ended=True)
    tail.close()
    assert [(event.number, event.left_out) for event in told] == [(1, 0), (2, 0)]
    assert told[0].text.startswith("[")
    assert told[1].text == "end"


def test_at_the_end_there_is_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tail, "DRAIN_S", 0.0)
    (tmp_path / "output.log").write_bytes(b"".join(map(line, range(80_000))))
    tail = OutputTail(tmp_path)
    told = tail.look(0.0, ended=True)
    tail.close()
    assert texts(told) == {event.number: f"line {event.number} of many" for event in told}
    assert told[-1].number == 79_999
    assert sum(event.left_out for event in told) + len(told) == 80_000
    assert tail._fold.offset == (tmp_path / "output.log").stat().st_size
