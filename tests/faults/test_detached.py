"""Whatever happens to terminal, screen, hub and keeper, a detached script ends as plain python's.

The same script runs plainly once; then under each misfortune with the same result, and its output
is in the log byte for byte.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import rendezvous
from mpwatch.cli.revive import ensure_hub
from mpwatch.live import hub_is_there
from mpwatch.stopping import stop_now
from tests.support.cli_runs import MARKER, Place, until
from tests.support.detached_runs import PRINTING, Detached

FIRST, REST = 200, 1500


class Plain:
    """What plain python prints and computes."""

    def __init__(self, place: Place, rest: int) -> None:
        script = place.script(PRINTING)
        for name in ("go", "end"):
            (place.directory / name).touch()
        done = place.python("-c", MERGED, script, str(FIRST), str(rest))
        assert done.returncode == 0, done.stderr
        self.output, self.result = done.stdout, (place.directory / "result").read_text()
        self.rest = rest


# One pipe for both streams, as a terminal has.
MERGED = "import os, sys; os.dup2(1, 2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(Place(tmp_path_factory.mktemp("plain")), REST)


@pytest.fixture(scope="module")
def plain_long(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(Place(tmp_path_factory.mktemp("long")), 60_000)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path)
    # A hub that a test starts is marked as well.
    for name in (MARKER, "TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, place.environment[name])
    yield place
    place.none_left()


def started(place: Place, plain: Plain, real_screen: bool = False) -> Detached:
    words = (place.script(PRINTING), str(FIRST), str(plain.rest))
    run = Detached(place, *words, real_screen=real_screen)
    run.halfway()
    return run


def serving(run: Detached, count: int) -> int:
    """The `count`-th hub, once it serves."""
    pid: int = run.place.entry("hub_started", count)["pid"]
    endpoint = run.directory / rendezvous.ENDPOINT_FILE
    until(lambda: (rendezvous.read_json(endpoint) or {}).get("pid") == pid, f"hub {count}")
    return pid


def ends_as_plain(run: Detached, plain: Plain, state: str = "never_trained") -> None:
    """The result, the log byte for byte, and every line told once or counted as left out."""
    run.go_on()
    assert run.result() == plain.result
    run.end()
    run.place.none_left()
    assert run.log() == plain.output
    assert run.place.state() == state
    lines = plain.output.decode().splitlines()
    told, expected = run.told(), 0
    for event in told:
        ours = event.text.startswith("mpwatch:")
        expected += event.left_out
        if not ours:
            assert event.text in lines
        assert event.number == expected
        expected += 1
    assert [event.text for event in told if not event.text.startswith("mpwatch:")][-1] == lines[-1]


def test_nothing_happens(place: Place, plain: Plain) -> None:
    run = started(place, plain)
    assert run.left() == 0
    assert place.state() == "starting"
    ends_as_plain(run, plain)


def test_terminal_closed_beneath_the_screen(place: Place, plain: Plain) -> None:
    run = started(place, plain, real_screen=True)
    seen = b""
    while b"\x1b[?1049h" not in seen:
        seen += os.read(run.terminal, 65536)
    os.close(run.terminal)
    os.waitpid(run.terminal_pid, 0)
    others = {run.script, run.hub, run.keeper, run.stand_in}
    until(lambda: set(place.processes()) <= others, "the end of the screen")
    ends_as_plain(run, plain)


def test_hub_killed_and_killed_again(place: Place, plain: Plain) -> None:
    run = started(place, plain)
    run.left()
    os.kill(run.hub, signal.SIGKILL)
    second = serving(run, 2)
    run.go_on()
    os.kill(second, signal.SIGKILL)
    run.result()
    serving(run, 3)
    ends_as_plain(run, plain)


def test_hub_killed_at_the_end_the_record_has_the_end_all_the_same(
    place: Place, plain: Plain
) -> None:
    run = started(place, plain)
    run.left()
    run.go_on()
    run.result()
    for count in (1, 2, 3):
        # The next one comes after 0.2, 0.4, 0.8 s: the script ends before that.
        os.kill(run.place.entry("hub_started", count)["pid"], signal.SIGKILL)
        place.entry("hub_exited", count)
    ends_as_plain(run, plain)


def test_hub_stopped_while_much_is_printed(place: Place, plain_long: Plain) -> None:
    run = started(place, plain_long)
    run.left()
    until((run.directory / "endpoint.json").exists, "the hub")
    os.kill(run.hub, signal.SIGSTOP)
    run.go_on()
    # The script comes to its end although nobody folds what it prints.
    run.result()
    os.kill(run.hub, signal.SIGCONT)
    ends_as_plain(run, plain_long)
    assert sum(event.left_out for event in run.told()) > 0


def test_keeper_killed_another_hub_and_a_stop(place: Place, plain: Plain) -> None:
    run = started(place, plain)
    run.left()
    for pid in (run.keeper, run.hub):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not rendezvous.is_alive(pid, None), "the death of a supervisor")
    assert place.state() == "starting"
    # More than the terminal holds: the stand-in reads.
    run.go_on()
    assert run.result() == plain.result
    ensure_hub(run.directory)
    assert hub_is_there(rendezvous.runtime_directory(run.directory))
    run.end()
    place.none_left()
    assert run.log() == plain.output
    assert b"the keeper was killed" in (run.directory / "output.log").read_bytes()
    assert place.state() == "lost"
    assert stop_now(run.directory) == f"the script (process {run.script}) has ended already"


def test_without_a_keeper_a_new_hub_serves_and_the_script_can_be_stopped(place: Place) -> None:
    run = Detached(place, place.script("import threading; print('here'); threading.Event().wait()"))
    run.left()
    runtime = rendezvous.runtime_directory(run.directory)
    until(lambda: b"here" in run.log() and hub_is_there(runtime), "the script and a hub")
    for pid in (run.keeper, run.hub):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not rendezvous.is_alive(pid, None), "the death of a supervisor")
    assert not hub_is_there(runtime)
    ensure_hub(run.directory)
    assert hub_is_there(runtime)
    ensure_hub(run.directory)  # there is one: nothing to do
    shown = place.mpwatch("show").stdout.decode()
    assert "its keeper was killed: the exit code will not be known" in shown
    said = stop_now(run.directory)
    assert said == f"the keeper is gone: sent SIGTERM to the script (process {run.script})"
    place.none_left()
    assert run.told()[0].text == "here"
    assert "exit code unknown: nobody saw the script end" in place.mpwatch("show").stdout.decode()


def test_stop_through_the_keeper(place: Place) -> None:
    run = Detached(place, place.script("import threading; print('here'); threading.Event().wait()"))
    run.left()
    until(lambda: b"here" in run.log(), "the script")
    assert stop_now(run.directory).startswith("asked the keeper to stop the script: SIGTERM")
    place.none_left()
    assert (place.state(), place.entry("exited")["code"]) == ("stopped", 143)
    assert stop_now(run.directory) == "the script has ended already"


TRAINING = """
import os, threading, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(60):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"line {number} " + "x" * 500, flush=True)
    threading.Event().wait(0.03 if os.path.exists("go") else 0.3)
"""


def test_keeper_and_stand_in_killed_the_agent_takes_the_output_over(place: Place) -> None:
    run = Detached(place, place.script(TRAINING))
    run.left()
    until(lambda: run.log().count(b"\n") > 1, "some steps")
    for pid in (run.stand_in, run.keeper):
        os.kill(pid, signal.SIGKILL)
    run.go_on()
    # More than the terminal holds.
    until(lambda: b"line 59 " in run.log(), "the end of the script")
    place.none_left()
    assert run.log() == b"".join(b"line %d %s\n" % (n, b"x" * 500) for n in range(60))
    assert b"output goes to the log directly" in (run.directory / "output.log").read_bytes()
    assert [event.number for event in run.told()] == list(range(61))


LEAVING = """
import os, signal, subprocess, sys
child = "import os, threading; print('child', flush=True); open('up', 'w').close()\\n"
child += "while not os.path.exists('go'): threading.Event().wait(0.01)\\n"
child += "print('child goes on', flush=True)"
subprocess.Popen([sys.executable, "-c", child])
while not os.path.exists("up"):
    pass
print(os.get_terminal_size(1), [os.isatty(number) for number in range(3)])
print(signal.getsignal(signal.SIGHUP), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
input("name? ")
"""


def test_a_keyboard_is_refused_at_once_and_what_a_script_leaves_behind_goes_on(
    place: Place,
) -> None:
    run = Detached(place, place.script(LEAVING))
    run.left()
    assert place.entry("exited")["code"] == 1
    log = (run.directory / "output.log").read_text()
    assert "os.terminal_size(columns=100, lines=30) [False, True, True]\n" in log
    assert "\n0 set()\nname? Traceback" in log  # SIG_DFL: as it is without a keeper
    assert log.splitlines()[-2].startswith("EOFError: ")
    assert log.splitlines()[-1].startswith("mpwatch: ")
    assert "--headless" in log.splitlines()[-1]
    run.go_on()
    place.none_left()
    assert run.log().endswith(b"child goes on\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, None), (signal.SIGTERM, 143)])
def test_signals_to_a_detached_keeper(
    place: Place, number: signal.Signals, code: int | None
) -> None:
    run = Detached(place, place.script("import threading; print('here'); threading.Event().wait()"))
    run.left()
    until(lambda: b"here" in run.log(), "the script")
    os.kill(run.keeper, number)
    if code is None:
        # A terminal that closes is no reason to end; a second signal shows that it was passed over.
        os.kill(run.keeper, signal.SIGINT)
        code = 130
    assert place.entry("exited")["code"] == code
