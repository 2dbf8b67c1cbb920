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
from typing import Any, Final

import zmq

from mpwatch import keeper_tail, rendezvous, wire
from mpwatch.codec import PROTOCOL
from mpwatch.errors import MpwatchError, RecordUnreadable
from mpwatch.hub import Hub, Outgoing
from mpwatch.keeper_tail import KeeperTail
from mpwatch.record import Record
from mpwatch.system import SystemSampler
from mpwatch.vocabulary import STDERR_PREFIX, clean_text

POLL_S: Final = 0.2
# Time for messages from agents between two looks at the watchers.
TURN_S: Final = 0.05
MAX_TOLD: Final = 100
SAMPLE_EVERY_S: Final = 5.0
LOOK_FOR_LIFE_EVERY_S: Final = 0.5
GONE_FOR_S: Final = 2.0
# Started without a keeper, before any rank has shown up.
WAIT_FOR_FIRST_RANK_S: Final = 60.0
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
        self._run_file = rendezvous.read_json(directory / rendezvous.RUN_FILE) or {}
        run = str(self._run_file.get("run_id") or directory.name)
        self._record = _open_record(directory, run, recorded)
        self.hub = Hub(run, self._record, self._trouble)
        self._tail = KeeperTail(directory / rendezvous.KEEPER_FILE)
        self._sampler = SystemSampler(directory)
        self._sampled_at = 0.0
        self._looked_at = 0.0
        self._alive_at = self._started_at = time.monotonic()
        self._exit_entries: list[dict[str, Any]] = []
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
            while not self.ending:
                self._turn(POLL_S)
                self._guarded(self._read_keeper)
                self._guarded(self._sample)
                self._guarded(self._look_for_life)
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

    # --- keeper and processes -------------------------------------------------------------

    def _read_keeper(self) -> None:
        now = time.time()
        for entry in self._tail.entries():
            kind = entry.get("event")
            if kind == "spawned":
                self._tell_exits()
                self._job_started(entry, now)
            elif kind == "exited":
                self._exit_entries.append(entry)
            elif kind == "ended":
                self.ending = True
        if self._exit_entries and not self._turn(QUIET_S):
            # What the script said last comes before its exit.
            self._tell_exits()

    def _job_started(self, entry: dict[str, Any], now: float) -> None:
        event = keeper_tail.job_started(entry)
        if event is not None:
            at = keeper_tail.time_of(entry, now)
            self.hub.job_started(event, keeper_tail.attempt_of(entry), at, now)

    def _tell_exits(self) -> None:
        for entry in self._exit_entries:
            event = keeper_tail.job_exited(entry)
            if event is not None:
                at = keeper_tail.time_of(entry, time.time())
                self.hub.job_exited(event, keeper_tail.attempt_of(entry), at)
        self._exit_entries.clear()

    def _sample(self) -> None:
        now = time.monotonic()
        if self.hub.job_is_over() or now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        roots = [pid for pid, started in self._processes() if rendezvous.is_alive(pid, started)]
        if roots:
            sampled = self._sampler.sample(roots, now)
            self.hub.say(sampled, time.time())

    def _processes(self) -> list[tuple[int, int | None]]:
        """The job as this run knows it: what the keeper spawned last, and the ranks."""
        state = self._record.fold.state
        known: list[tuple[int, int | None]] = []
        if state.attempts and state.attempts[-1].pid and state.attempts[-1].ended_at is None:
            known.append((state.attempts[-1].pid, state.attempts[-1].process_start_time))
        known += [
            (rank.pid, rank.process_start_time)
            for rank in state.ranks.values()
            if rank.pid is not None
        ]
        return known

    def _look_for_life(self) -> None:
        """End when keeper and job are gone; by pid and start time, since pids are reused."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_LIFE_EVERY_S:
            return
        if now - self._looked_at > GONE_FOR_S:
            self._alive_at = now  # this hub was stopped itself
        self._looked_at = now
        keeper = self._run_file.get("keeper")
        known = self._processes()
        if isinstance(keeper, dict) and isinstance(keeper.get("pid"), int):
            known.append((keeper["pid"], keeper.get("start_time")))
        elif not known and now - self._started_at < WAIT_FOR_FIRST_RANK_S:
            return
        if any(rendezvous.is_alive(pid, started) for pid, started in known):
            self._alive_at = now
        elif now - self._alive_at > GONE_FOR_S:
            self.ending = True

    # --- the end --------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take what is still in the sockets, until they are quiet."""
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and self._turn(QUIET_S):
            pass
        self._read_keeper()
        self._tell_exits()
        if self._record.path is None:
            until = time.monotonic() + LINGER_WITHOUT_RECORD_S
            while time.monotonic() < until:
                self._turn(QUIET_S)

    def _close(self) -> None:
        self._guarded(lambda: self.hub.finish(time.time()))
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
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{pid} {rendezvous.process_start_time(pid)}\n".encode())
    return descriptor


def main(arguments: list[str] | None = None) -> int:
    """Run a hub to its end; 0 also where another hub is there already."""
    parser = argparse.ArgumentParser(prog="mpwatch.hub_process", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
        process.run()
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
