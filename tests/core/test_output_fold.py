"""The fold shows what a terminal shows: recorded programs against an emulator's screen."""

import random
from pathlib import Path

import pytest

from mpwatch.output_fold import WINDOW_ROWS, Line, OutputFold

PRINTED = Path(__file__).with_name("printed")
PROGRAMS = ("escapes", "tqdm_postfix", "tqdm_nested", "rich_progress")


def printed(program: str) -> tuple[bytes, list[str]]:
    screen = (PRINTED / f"{program}.txt").read_text("utf-8")
    return (PRINTED / f"{program}.bytes").read_bytes(), screen.splitlines()


def folded(
    data: bytes, size: int, second: float, fold: OutputFold | None = None
) -> tuple[dict[int, str], list[Line]]:
    """The text of each line as told last, and everything that was told; `second` per piece."""
    fold, told, now = fold or OutputFold(), [], 0.0
    for begin in range(0, len(data), size):
        fold.feed(data[begin : begin + size])
        now += second
        told += fold.lines(now)
    told += fold.lines(now + 10, ended=True)
    return {line.number: line.text for line in told}, told


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("size", "second"), [(1, 0.0), (7, 0.0), (7, 0.3), (64, 2.0), (10**6, 0)])
def test_the_final_text_is_what_a_terminal_shows(program: str, size: int, second: float) -> None:
    data, screen = printed(program)
    text, told = folded(data, size, second)
    assert [text[number] for number in range(len(screen))] == screen
    assert len(text) == len(screen)
    assert [line for line in told if line.number == len(screen) - 1][-1].offset == len(data)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_successor_goes_on_wherever_the_first_was_cut(program: str) -> None:
    data, screen = printed(program)
    dice = random.Random(7)
    for _ in range(12):
        cut, second = dice.randrange(len(data)), dice.choice([0.01, 0.5])
        fold, told, now = OutputFold(), [], 0.0
        for begin in range(0, cut, 7):
            fold.feed(data[begin : min(cut, begin + 7)])
            now += second
            told += fold.lines(now)
        text = {line.number: line.text for line in told}
        done = [(line.number + 1, line.offset) for line in told if not line.unfinished]
        number, offset = max(done, default=(0, 0))
        text.update(folded(data[offset:], 7, second, OutputFold(offset, number))[0])
        assert [text[n] for n in sorted(text)] == screen


def test_plain_lines_are_told_at_once_and_only_once() -> None:
    fold = OutputFold()
    fold.feed(b"one\ntwo\nthr")
    told = fold.lines(0.0)
    assert [(line.text, line.offset, line.unfinished) for line in told] == [
        ("one", 4, False), ("two", 8, False), ("thr", 8, True),
    ]  # fmt: skip
    fold.feed(b"ee\n")
    assert [(line.number, line.text, line.offset) for line in fold.lines(0.1)] == [(2, "three", 14)]
    assert fold.lines(100.0) == []


def test_a_bar_is_told_about_once_a_second_while_it_moves() -> None:
    fold, told = OutputFold(), []
    for tick in range(100):
        fold.feed(b"\r%d%%" % tick)
        told += fold.lines(tick / 10)
    assert all(line.unfinished and line.number == 0 for line in told)
    assert 9 <= len(told) <= 11
    fold.feed(b"\n")
    assert all(line.unfinished for line in fold.lines(10.0))  # it may still be drawn anew
    settled = [line for now in (11.1, 12.2, 13.3) for line in fold.lines(now)]
    assert settled == [Line(0, "99%", len(b"\r0%") * 10 + len(b"\r10%") * 90 + 1, False)]


def test_a_row_above_is_drawn_anew_after_it_was_told() -> None:
    fold = OutputFold()
    fold.feed(b"epoch 0\nstep 0")
    assert [line.text for line in fold.lines(0.0)] == ["epoch 0", "step 0"]
    fold.feed(b"\x1b[A\repoch 1\n")
    assert [(line.number, line.text) for line in fold.lines(5.0)] == [(0, "epoch 1")]


def test_what_leaves_the_window_is_told_and_can_not_be_reached() -> None:
    fold = OutputFold()
    fold.feed(b"".join(b"\rrow %d\n" % n for n in range(WINDOW_ROWS + 5)))
    told = fold.lines(0.0)
    fold.feed(b"\x1b[999A\rover\x1b[999B")
    told += fold.lines(9.0, ended=True)
    text = {line.number: line.text for line in told}
    assert [text[n] for n in range(6)] == [f"row {n}" for n in range(6)]
    assert text[6] == "over6"  # "row 6", its first four cells overwritten
    assert [n for n, line in text.items() if line.startswith("over")] == [6]


def test_bytes_that_are_no_text_do_no_harm() -> None:
    dice = random.Random(3)
    fold = OutputFold()
    for _ in range(300):
        alphabet = b"\x1b[]P0;9AJKGCDm\r\n\b\t\x07\x00\x9b\xc3\xa4\xe4 xyz"
        fold.feed(bytes(dice.choices(alphabet, k=dice.randrange(40))))
        for line in fold.lines(dice.random() * 100):
            assert line.text.isprintable()
    fold.feed(b"\x1b]" + b"x" * 100_000 + b"\nend")
    assert fold.lines(1e6, ended=True)[-1].text == "end"
    fold.feed(b"long" * 100_000 + b"\x1b[99999G*\n")
    assert max(len(line.text) for line in fold.lines(2e6)) <= 4001
