"""Two screens on one real hub: what they show, what they ask, and what a dead hub does to them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch.cli import screen
from mpwatch.events import CommandApplied
from tests.support.hub_runs import Run, a_run, until
from tests.support.terminals import Terminal


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "run") as run:
        yield run


def print_line(run: Run, text: str) -> None:
    """What the keeper does with the script's output."""
    with (run.directory / "output.log").open("a") as file:
        file.write(text + "\n")


def watch(run: Run, readonly: bool) -> Terminal:
    return Terminal(lambda: screen.watch_in_terminal(run.directory, readonly=readonly))


def test_screens_come_and_hubs_go(run: Run) -> None:
    hub = run.start_hub()
    agent = run.agent()
    agent.bind()
    agent.steps(1, 5)
    print_line(run, "line-1")
    terminals = [watch(run, readonly=False), watch(run, readonly=True)]
    try:
        for terminal in terminals:
            terminal.until("line-1")
            terminal.until("live")
        # The read-only screen has no such key: one command comes, from the other one.
        for terminal in reversed(terminals):
            terminal.press(b" ")
        heard = agent.hear()
        agent.say(CommandApplied(id=heard["id"], command="pause", step=5))
        terminals[0].until("pause: applied at step 5")
        terminals[1].until("attached read-only")
        terminals[1].until("pause applied at step 5")

        hub.send_signal(signal.SIGKILL)
        hub.wait()
        for terminal in terminals:
            terminal.until("hub lost")
            terminal.seen.clear()
        run.start_hub()
        print_line(run, "line-2")
        for terminal in terminals:
            terminal.until("line-2")
            terminal.until("a new hub took over")

        terminals[0].press(b"q")
        assert terminals[0].end() == 0
        assert b"still running; come back with: mpwatch attach" in terminals[0].seen
        run.end(code=4)
        terminals[1].until("ended; from the record")
        terminals[1].until("exit code 4")
        terminals[1].press(b"q")
        assert terminals[1].end() == 0
        assert b"crashed, exit code 4" in terminals[1].seen
    finally:
        for terminal in terminals:
            terminal.close()
    assert not agent.socket.poll(0), "a second command came"
    until(lambda: all(hub.poll() is not None for hub in run.hubs))
