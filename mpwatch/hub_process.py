"""The hub's process: `python -P -m mpwatch.hub_process RUN_DIRECTORY [--no-record]`.

Wires hub, record, sockets, the keeper's file and the system sampler into one poll loop without
threads. One per run (a lock), replaceable at any time: started again, it continues the record. It
ends when the keeper says so, or by itself when keeper and all ranks are gone.
"""

import argparse
import contextlib
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import zmq

from mpwatch import rendezvous, wire
from mpwatch.codec import PROTOCOL
from mpwatch.errors import MpwatchError, RecordUnreadable
from mpwatch.hub import Hub, Outgoing
from mpwatch.job_watch import JobWatch
from mpwatch.record import Record
from mpwatch.vocabulary import STDERR_PREFIX, clean_text

POLL_S: Final = 0.2
# Time for messages from agents between two looks at the watchers.
TURN_S: Final = 0.05
MAX_TOLD: Final = 100
QUIET_S: Final = 0.05
DRAIN_S: Final = 1.5
# Without a record, who follows has no other place to read the last events.
LINGER_WITHOUT_RECORD_S: Final = 0.6
LOCK_WAIT_S: Final = 1.0


_Handle = Callable[[bytes, list[bytes], float], list[Outgoing]]


def say(text: str) -> None:
    """One line on stderr, which the keeper lets go to `hub.log`."""
    with contextlib.suppress(OSError):
        print(f"{STDERR_PREFIX}{text}", file=sys.stderr, flush=True)


class HubProcess:
    """The loop. `run()` returns when the hub has ended in order."""

    def __init__(self, directory: Path, recorded: bool) -> None:
        """Take over the run in `directory`; the lock is held already."""
        self._directory = directory
        self._runtime = rendezvous.runtime_directory(directory)
        run_file = rendezvous.read_json(directory / rendezvous.RUN_FILE) or {}
        run = str(run_file.get("run_id") or directory.name)
        self._record = _open_record(directory, run, recorded)
        self.hub = Hub(run, self._record, self._trouble)
        settings = run_file.get("settings")
        stall_after = settings.get("stall_after") if isinstance(settings, dict) else None
        if isinstance(stall_after, int | float):
            self.hub.stall_after_s = stall_after
        self._job = JobWatch(directory, run_file, self.hub)
        self._told: set[str] = set()
        self.ending = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._agents = wire.hub_socket(self._context, rendezvous.agent_endpoint(self._runtime))
        self._watchers = wire.hub_socket(self._context, rendezvous.watch_endpoint(self._runtime))
        self._poller = zmq.Poller()
        self._poller.register(self._agents, zmq.POLLIN)
        self._poller.register(self._watchers, zmq.POLLIN)
        self._announce()

    def _announce(self) -> None:
        pid = os.getpid()
        endpoint = {
            "pid": pid,
            "start_time": rendezvous.process_start_time(pid),
            "agent": rendezvous.agent_endpoint(self._runtime),
            "watch": rendezvous.watch_endpoint(self._runtime),
            "protocol": PROTOCOL,
        }
        try:
            rendezvous.write_json(self._directory / rendezvous.ENDPOINT_FILE, endpoint)
        except OSError as error:
            say(f"cannot write {rendezvous.ENDPOINT_FILE}: {error}")

    def run(self) -> None:
        """Serve until the end, then drain, commit and close."""
        try:
            self.hub.start(os.getpid(), time.time())
            while not self.ending and not self._job.over:
                self._turn(POLL_S)
                # In this order: what a script prints comes after its start.
                self._guarded(lambda: self._job.read_keeper(self._is_quiet))
                self._guarded(self._job.tell_output)
                self._guarded(self._job.sample)
                self._guarded(self._job.look_for_life)
            self._drain()
        finally:
            self._close()

    # --- one turn -------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> bool:
        """Wait for messages and handle them; whether an agent said anything."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        heard = False
        if self._agents in ready:
            heard = self._receive(self._agents, self.hub.on_agent_message)
        if self._watchers in ready:
            self._receive(self._watchers, self.hub.on_watch_message)
        self._guarded(lambda: self.hub.tick(time.time()))
        return heard

    def _is_quiet(self) -> bool:
        """Whether no agent says anything for a moment; watchers are answered meanwhile."""
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            if self._turn(left):
                return False
        return True

    def _receive(self, socket: zmq.Socket[bytes], handle: _Handle) -> bool:
        """Handle what is there, for a while: the other socket waits meanwhile."""
        heard = False
        until = time.monotonic() + TURN_S
        while time.monotonic() < until:
            try:
                identity, *parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            heard = True
            self._guarded(partial(handle, identity, parts, time.time()))
        return heard

    def _guarded(self, act: Callable[[], Iterable[Outgoing] | None]) -> None:
        """Nothing that one message or look does may end the hub."""
        try:
            for outgoing in act() or ():
                self._send(outgoing)
        except Exception as error:
            self._record.fold.reject("failed")
            self._trouble(error)

    def _trouble(self, error: Exception) -> None:
        """Tell of an exception once per place it came from."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} {place.filename}:{place.lineno}"
        if kind not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(kind)
            say(f"could not handle something: {type(error).__name__}: {error}")
            with contextlib.suppress(OSError):
                traceback.print_exception(error)

    def _send(self, outgoing: Outgoing) -> None:
        socket = self._agents if outgoing.to_agent else self._watchers
        try:
            socket.send_multipart(outgoing.parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            # Gone, or too slow to take it. A watcher asks again; an agent shows up again.
            if outgoing.to_agent:
                self.hub.desk.lost(outgoing.parts[0])

    # --- the end --------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take what is still in the sockets, until they are quiet."""
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and not self._is_quiet():
            pass
        self._guarded(lambda: self._job.read_keeper(lambda: True))
        self._guarded(self._job.tell_exits)
        self._guarded(self._job.close)
        if self._record.path is None:
            until = time.monotonic() + LINGER_WITHOUT_RECORD_S
            while time.monotonic() < until:
                self._turn(QUIET_S)

    def _close(self) -> None:
        over = self._job.over or self.hub.job_is_over()
        self._guarded(lambda: self.hub.finish(time.time(), over))
        self._agents.close()
        self._watchers.close()
        self._context.term()
        for path in (
            self._runtime / rendezvous.AGENT_SOCKET,
            self._runtime / rendezvous.WATCH_SOCKET,
            self._directory / rendezvous.ENDPOINT_FILE,
        ):
            with contextlib.suppress(OSError):
                path.unlink()


def _open_record(directory: Path, run: str, recorded: bool) -> Record:
    if not recorded:
        return Record(None, run)
    try:
        return Record(directory / rendezvous.RECORD_FILE, run)
    except (RecordUnreadable, OSError, sqlite3.Error) as error:
        say(f"no record can be written ({error}); watching goes on without one")
        return Record(None, run, unrecorded=clean_text(str(error)))


def _take_lock(runtime: Path) -> int | None:
    """The hub's lock. Somebody may hold it for a moment only to see whether a hub is there."""
    until = time.monotonic() + LOCK_WAIT_S
    while (descriptor := rendezvous.try_lock(runtime / rendezvous.HUB_LOCK)) is None:
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
    # Who only wants to know whether a hub is there reads this instead of taking the lock.
    pid = os.getpid()
    words = f"{pid} {rendezvous.process_start_time(pid)}\n"
    with contextlib.suppress(OSError):  # a full disk
        os.pwrite(descriptor, words.ljust(64).encode(), 0)
    return descriptor


def main(arguments: list[str] | None = None) -> int:
    """Run a hub to its end; 0 also where another hub is there already."""
    parser = argparse.ArgumentParser(prog="mpwatch.hub_process", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Everything of a run is its owner's alone, wherever its directory is moved to.
    os.umask(0o077)
    try:
        runtime = rendezvous.make_runtime_directory(options.directory)
        lock = _take_lock(runtime)
    except (MpwatchError, OSError) as error:
        say(f"no hub: {error}")
        return 1
    if lock is None:
        say(f"a hub of {options.directory} is running already")
        return 0
    try:
        process = HubProcess(options.directory, recorded=not options.no_record)

        def end(number: int, frame: FrameType | None) -> None:
            process.ending = True

        signal.signal(signal.SIGTERM, end)
        # The keeper starts a hub with SIGTERM blocked, so that it hears one sent this early.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        process.run()
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
