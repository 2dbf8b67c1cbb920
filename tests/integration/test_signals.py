"""Signals through the keeper: each reaches the script once, and its death is told rightly."""

import json
import os
import pty
import signal
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.support.cli_runs import Place, until, until_ready

# Counts interrupts; a second one would cut the clean-up short.
INTERRUPTED = """
import threading, sys
wait = threading.Event().wait
try:
    print("ready", flush=True)
    while True:
        wait(0.05)
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    wait(0.8)
    print("cleaned up", flush=True)
sys.exit(11)
"""

HANDLING = """
import json, signal, sys, threading
counts = {}
def note(number, frame):
    counts[number] = counts.get(number, 0) + 1
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
    signal.signal(number, note)
print("ready", flush=True)
wait = threading.Event().wait
while signal.SIGUSR2 not in counts:
    wait(0.02)
print(json.dumps({signal.Signals(n).name: c for n, c in counts.items()}))
"""

WAITING = "import threading; print('ready', flush=True); threading.Event().wait(60)"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


def read_all(descriptor: int) -> bytes:
    """Everything until the terminal has no user any more."""
    seen = b""
    while True:
        try:
            data = os.read(descriptor, 1000)
        except OSError:
            return seen
        if not data:
            return seen
        seen += data


def test_ctrl_c_in_a_terminal_interrupts_once(place: Place) -> None:
    """The kernel signals keeper and script; passed on as well, it would break the clean-up."""
    master, slave = pty.openpty()
    script = place.script(INTERRUPTED)
    process = place.start(
        "run",
        "--headless",
        script,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    until_ready(master)
    os.write(master, b"\x03")
    output = read_all(master)
    os.close(master)
    assert process.wait(20) == 11
    assert output.count(b"interrupted") == 1
    assert b"cleaned up" in output


def test_a_terminal_that_hangs_up_ends_the_script(place: Place) -> None:
    """The keeper leads the session here, so the kernel tells it alone."""
    master, slave = pty.openpty()
    process = place.start(
        "run",
        "--headless",
        place.script(WAITING),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    until_ready(master)
    os.close(master)
    assert process.wait(20) == 129
    assert place.state() == "preempted"


def test_kill_int_interrupts_once(place: Place) -> None:
    process = place.start("run", "--headless", place.script(INTERRUPTED))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 11
    assert output == b"interrupted\ncleaned up\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_whole_group_reaches_the_script_once(place: Place, name: str) -> None:
    """As `timeout` and schedulers send it: a second one would cut the clean-up short."""
    text = INTERRUPTED.replace(
        "try:", f"import signal\nsignal.signal(signal.{name}, signal.default_int_handler)\ntry:", 1
    )
    process = place.start("run", "--headless", place.script(text))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    # Keeper alone, then the group with keeper and script, at once: what `timeout` does.
    process.send_signal(signal.Signals[name])
    os.killpg(process.pid, signal.Signals[name])
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (11, b"interrupted\ncleaned up\n")


def test_an_interrupted_script_ends_with_130_and_counts_as_stopped(place: Place) -> None:
    process = place.start("run", "--headless", place.script(WAITING))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.count(b"KeyboardInterrupt") == 1
    assert place.state() == "stopped"


def test_every_other_signal_reaches_the_script_once(place: Place) -> None:
    process = place.start("run", "--headless", place.script(HANDLING))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    names = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGALRM", "SIGUSR2")
    for name in names:
        process.send_signal(signal.Signals[name])
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(output) == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGTERM, 143, "preempted"), (signal.SIGHUP, 129, "preempted"), (9, 137, "killed")],
)
def test_a_script_that_dies_of_a_signal(place: Place, number: int, code: int, state: str) -> None:
    process = place.start("run", "--headless", place.script(WAITING))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    target = place.entry("spawned")["pid"] if number == signal.SIGKILL else process.pid
    os.kill(target, number)
    process.communicate(timeout=20)
    assert process.returncode == code
    exited = place.entry("exited")
    assert (exited["code"], exited["signal"]) == (code, signal.Signals(number).name)
    assert place.state() == state


def test_nohup_is_kept(place: Place) -> None:
    """A SIGHUP that the caller ignores is ignored by keeper and script alike."""
    process = place.start(
        "run",
        "--headless",
        place.script(WAITING),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_signal_before_the_script_starts_ends_the_run(place: Place) -> None:
    """Sent while the command line still prepares: blocked, kept, and obeyed."""
    process = place.start("run", "--headless", place.script(WAITING))
    until(place.runs, "the run directory")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode in (143, -signal.SIGTERM)


def test_stop_now_ends_even_a_script_that_does_not_listen(place: Place) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITING
    process = place.start("run", "--headless", "--grace", "0.3", place.script(deaf))
    assert process.stdout is not None
    until_ready(process.stdout.fileno())
    with open(place.run() / "requests.jsonl", "a") as file:
        file.write('not json\n{"request": "who knows"}\n{"request": "stop_now"}\n')
    process.communicate(timeout=20)
    assert process.returncode == 137
    assert place.entry("exited")["cause"] == "stop_now"
    assert place.state() == "stopped"
