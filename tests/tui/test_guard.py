"""The terminal after the screen: as it was, whatever became of that, and nobody left on it."""

import json
import os
import re
import signal
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpwatch import rendezvous
from mpwatch.cli import attach, replay, screen
from mpwatch.cli.main import main
from mpwatch.codec import decode_frames
from mpwatch.errors import UsageError
from mpwatch.record import Record
from mpwatch_tui import entry
from tests.support.hub_runs import until
from tests.support.pictured import told
from tests.support.terminals import Terminal

# Each of these undoes something that the screen switches on (tried; see `mpwatch.cli.screen`).
UNDOING = (
    *("?25h", "?7h", "?1000l", "?1003l", "?1006l", "?1015l", "?1016l", "?1004l", "?2004l"),
    *("?2026l", "?2048l", "<u", "0m"),
)

Start = Callable[..., Terminal]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ended run with a record."""
    directory = tmp_path_factory.mktemp("runs") / "20261130-120000-ab12"
    directory.mkdir()
    rendezvous.write_json(
        directory / "run.json", {"run_id": directory.name, "name": "char_gpt", "started_at": 1.8e9}
    )
    entries = [
        {"event": "spawned", "attempt": 1, "pid": 2**22, "start_time": 1, "time": 1.8e9},
        {"event": "exited", "attempt": 1, "code": 7, "time": 1.8e9 + 60},
        {"event": "ended"},
    ]
    (directory / "keeper.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    record = Record(directory / "record.sqlite", directory.name)
    frames = told(40)
    for data, (frame, event) in zip(frames, decode_frames(frames), strict=True):
        record.append(data, frame, event)
    record.close(time.time())
    return directory


@pytest.fixture
def start(run_directory: Path) -> Iterator[Start]:
    terminals: list[Terminal] = []

    def go(ignore_hangup: bool = False, **options: bool) -> Terminal:
        terminals.append(
            Terminal(lambda: screen.watch_in_terminal(run_directory, **options), ignore_hangup)
        )
        terminals[-1].until("loss scale")
        return terminals[-1]

    yield go
    for terminal in terminals:
        terminal.close()


def last_words(terminal: Terminal) -> str:
    """What was written after the last escape sequence."""
    return terminal.seen.decode().rpartition("\x1b[0m")[2].replace("\r\n", "\n")


def is_as_before(terminal: Terminal) -> bool:
    written = terminal.seen.decode()
    end = written.rindex("\x1b[?25h\x1b[?7h")
    assert all(f"\x1b[{undoing}" in written[end:] for undoing in UNDOING)
    # As often off the alternate screen as on it, and off last.
    assert written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h")
    return bool(termios.tcgetattr(terminal.master) == terminal.modes)


def test_q_leaves_a_clean_terminal_and_says_how_the_run_ended(start: Start) -> None:
    terminal = start()
    assert termios.tcgetattr(terminal.master) != terminal.modes
    terminal.press(b"q")
    assert terminal.end() == 0
    assert is_as_before(terminal)
    words = last_words(terminal)
    assert "crashed, exit code 7; see: mpwatch show" in words
    assert words.count("\n") == 1


def colour_codes(written: bytes) -> set[str]:
    """The parameters of all SGR sequences that choose a colour."""
    found = re.findall(r"\x1b\[([0-9;]*)m", written.decode())
    return {code for code in found if re.search(r"\b(?:[349][0-8]|10[0-7])\b", code)}


@pytest.mark.parametrize("colours", [True, False])
def test_no_color_means_no_code_of_a_colour(run_directory: Path, colours: bool) -> None:
    environment = {"COLORTERM": "truecolor"} | ({} if colours else {"NO_COLOR": "1"})
    terminal = Terminal(lambda: screen.watch_in_terminal(run_directory), **environment)
    terminal.until("loss scale")
    terminal.press(b"?")
    terminal.until("this help")
    terminal.press(b"?q")
    assert terminal.end() == 0
    terminal.close()
    assert (colour_codes(bytes(terminal.seen)) != set()) is colours


def test_ctrl_c_while_the_screen_comes_up_is_no_end(run_directory: Path) -> None:
    def slow(**_: object) -> int:
        print("coming", flush=True)
        return 0 if os.read(0, 10) == b"up\n" else 3

    def body() -> int:
        entry.show = slow
        return screen.watch_in_terminal(run_directory)

    terminal = Terminal(body)
    terminal.until("coming")
    terminal.press(b"\x03")
    terminal.until("^C")
    terminal.press(b"up\n")
    assert terminal.end() == 0
    assert termios.tcgetattr(terminal.master) == terminal.modes
    terminal.close()


def test_the_first_screen_of_a_run_ends_with_the_scripts_code(start: Start) -> None:
    terminal = start(first=True)
    terminal.press(b"\x03")
    assert terminal.end() == 7


def test_a_killed_screen_leaves_a_clean_terminal(start: Start) -> None:
    terminal = start()
    (child,) = terminal.children()
    os.kill(child, signal.SIGKILL)
    assert terminal.end() == 128 + signal.SIGKILL
    assert is_as_before(terminal)
    assert last_words(terminal).startswith("mpwatch: the screen died of SIGKILL\n")


def test_sigterm_to_the_guard_ends_the_screen_by_itself(start: Start) -> None:
    terminal = start()
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert is_as_before(terminal)
    assert "died" not in last_words(terminal)


def test_a_hang_up_ends_everything_even_where_it_was_ignored(start: Start) -> None:
    terminal = start(ignore_hangup=True)
    (child,) = terminal.children()
    started = rendezvous.process_start_time(child)
    terminal.hang_up()
    assert terminal.end() in (128 + signal.SIGHUP, 128 + signal.SIGTERM)
    until(lambda: not rendezvous.is_alive(child, started), what="the screen to be gone")


def test_without_its_guard_the_screen_goes_too(start: Start) -> None:
    terminal = start()
    (child,) = terminal.children()
    started = rendezvous.process_start_time(child)
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.end() == 128 + signal.SIGKILL
    until(lambda: not rendezvous.is_alive(child, started), what="the screen to be gone")


def test_a_terminal_that_cannot_show_it_is_refused_with_what_to_do(run_directory: Path) -> None:
    def refused() -> int:
        for check in (attach.run, replay.run):
            with pytest.raises(UsageError, match=r"TERM=dumb.*mpwatch (tail|show) RUN"):
                check(None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="mpwatch run --headless"):
            screen.watch_in_terminal(run_directory, first=True)
        return 0

    terminal = Terminal(refused, TERM="dumb")
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.seen
    terminal.close()


@pytest.mark.parametrize("verb", ["attach", "replay"])
def test_without_a_terminal_one_line_and_exit_code_2(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_is_terminal", lambda descriptor: descriptor == screen.INPUT)
    assert main([verb]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mpwatch: stdout is not a terminal; use: mpwatch ")
    assert said.err.count("\n") == 1
