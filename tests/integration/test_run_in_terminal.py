"""`mpwatch run` in a terminal: when it shows a screen, when it does not, and its exit code."""

import contextlib
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import MPWATCH, Place, keeper_entries, until
from tests.support.detached_runs import Detached

# What a screen begins with.
ALTERNATE_SCREEN = b"\x1b[?1049h"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


def in_terminal(
    place: Place, *words: str, errors: str = "", instead: str = "", **environment: str
) -> tuple[int, bytes]:
    """Run mpwatch, or `instead`, on a terminal to its end; its exit code and what it showed."""
    command = [sys.executable, "-c", instead] if instead else MPWATCH
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(place.directory)
        if errors:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        given = {**place.environment, "TERM": "xterm-256color", **environment}
        os.execve(command[0], [*command, *words], given)
    seen = b""
    with contextlib.suppress(OSError):
        while data := os.read(master, 65536):
            seen += data
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen


SCRIPT = "import os, sys; print([os.isatty(n) for n in range(3)]); sys.exit(5)"


def test_a_terminal_without_a_cursor_is_refused_before_anything_is_made(place: Place) -> None:
    code, seen = in_terminal(place, "run", place.script(SCRIPT), TERM="dumb")
    assert code == 2
    assert seen.count(b"\n") == 1
    assert b"use: mpwatch run --headless" in seen
    assert not place.runs()


@pytest.mark.parametrize(
    ("words", "options", "shown"),
    [
        (["--headless"], {}, b"[True, True, True]\r\n"),
        ([], {"errors": "errors"}, b"[True, True, False]\r\n"),
        ([], {"MPWATCH_DISABLED": "1"}, b"[True, True, True]\r\n"),
    ],
)
def test_runs_in_the_foreground(
    place: Place, words: list[str], options: dict[str, Any], shown: bytes
) -> None:
    assert in_terminal(place, "run", *words, place.script(SCRIPT), **options) == (5, shown)


def test_a_job_that_ends_beneath_the_screen_gives_its_exit_code(place: Place) -> None:
    run = Detached(place, place.script(SCRIPT), real_screen=True)
    seen = b""
    while ALTERNATE_SCREEN not in seen:
        seen += os.read(run.terminal, 65536)
    until(lambda: keeper_entries(run.directory)[-1]["event"] == "hub_exited", "the end of the job")
    os.write(run.terminal, b"q")
    assert run.left() == 5
    assert (run.directory / "output.log").read_bytes() == b"[False, True, True]\n"


COUNTING = "import os; os.write(os.open('count', os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'.'); "

# mpwatch on a machine where something is wrong. The screen is left when the keeper has ended.
MISFORTUNE = """
import errno, os, sys
from mpwatch.cli import detach, launch, main, screen
def watch(directory, *, ended, **_):
    os.waitid(os.P_PID, keepers[0].pid, os.WEXITED | os.WNOWAIT)
    print("screen", *screen.farewell(directory, 0, False, ended()), flush=True)
    return 99 if ended() is None else ended()
screen.watch_in_terminal = watch
def full(*_):
    raise OSError(errno.ENOSPC, "full")
if not os.environ["WRONG"]:
    launch._exec_keeper = launch.write_run_file = full
keepers = []
class Kept(detach.DetachedKeeper):
    def start(self, specification):
        keepers.append(self)
        exec(os.environ["WRONG"])
        super().start(specification)
detach.DetachedKeeper = Kept
sys.exit(main.main(["run", *sys.argv[1:]]))
"""
NO_JOURNAL = "os.mkdir(specification['run_directory'] + '/keeper.jsonl')"
NO_KEEPER = ""
KEEPER_FAILS = "specification['grace_s'], specification['run_directory'] = 1, None"


@pytest.mark.parametrize(
    ("wrong", "code", "shown"),
    [
        # What a file that cannot be made does not say means nothing.
        (NO_JOURNAL, 3, b"screen mpwatch: the script ended with exit code 3; "),
        (NO_JOURNAL, 0, b"screen mpwatch: the script ended with exit code 0; "),
        # Neither a keeper nor room on the disk.
        (NO_KEEPER, 0, b"mpwatch: runs unwatched: cannot start the keeper: "),
        # It ends before it takes the script on: then the foreground has it.
        (KEEPER_FAILS, 3, b"here"),
    ],
)
def test_whatever_is_wrong_the_script_runs_once_and_has_its_exit_code(
    place: Place, wrong: str, code: int, shown: bytes
) -> None:
    script = place.script(f"{COUNTING}print('here'); raise SystemExit({code})")
    found, seen = in_terminal(place, script, instead=MISFORTUNE, WRONG=wrong)
    assert (found, shown in seen) == (code, True), seen
    assert (place.directory / "count").read_text() == "."
