"""Start a hub for a process that is running already: what `watch(serve=True)` calls.

Prints, as JSON, what the agent in that process needs; then stays behind as its keeper, tends the
hub and notes the process's end. It cannot know an exit code that is not its child's.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from mpwatch import rendezvous
from mpwatch.cli import launch, places
from mpwatch.cli.configuration import resolve
from mpwatch.errors import UsageError
from mpwatch.keeper_files import Journal
from mpwatch.keeper_hub import Hub

TICK_S = 0.5
HUB_WAIT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which process to serve."""
    parser.add_argument("--pid", type=int, required=True, help="the process to start a hub for")
    parser.add_argument("--name", help="a name for the run")
    parser.add_argument("--runs-dir", metavar="DIR", help="where run directories go")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a run for the process, then keep it from a child of its own session."""
    start_time = rendezvous.process_start_time(arguments.pid)
    if start_time is None:
        raise UsageError(f"no process {arguments.pid}")
    configuration = resolve(
        {"name": arguments.name, "runs_dir": arguments.runs_dir}, os.environ, ".", None
    )
    command = _command_of(arguments.pid)
    if os.fork():
        return 0
    os.setsid()
    place = places.prepare(command, configuration, inject=True)
    if place is None or place.runtime is None:
        return 1
    agent = launch.agent_specification(place, configuration, os.environ)
    journal = Journal(str(place.directory))
    log = str(place.directory / rendezvous.HUB_LOG_FILE)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    hub = Hub(launch.hub_command(place), log, journal, {int(number) for number in mask})
    journal.write("spawned", pid=arguments.pid, start_time=start_time, attempt=1)
    _wait_for(hub, place.directory / rendezvous.ENDPOINT_FILE)
    print(json.dumps({**(agent or {}), "attempt": 1}), flush=True)
    _leave_terminal()
    while rendezvous.is_alive(arguments.pid, start_time):
        hub.tend(time.monotonic())
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)
    journal.write("exited", code=None, signal=None, attempt=1, cause="served")
    journal.write("ended")
    hub.end()
    # Not an ending of Python's: the caller's buffers were copied by the fork.
    os._exit(0)


def _wait_for(hub: Hub, endpoint: Path) -> None:
    """A process that asks for a hub waits for it: even a loop of a second is then recorded."""
    until = time.monotonic() + HUB_WAIT_S
    while not endpoint.exists() and time.monotonic() < until:
        hub.tend(time.monotonic())
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _command_of(pid: int) -> list[str]:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(word) for word in words if word] or [str(pid)]


def _leave_terminal() -> None:
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
