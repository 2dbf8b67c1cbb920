"""A running job, asked through its hub's socket; and whether there is a hub, and a job, at all.

Survives the hub: a question that a dying hub lost is asked again, on the same socket.
"""

import contextlib
import time
from pathlib import Path
from typing import Final

import msgspec
import zmq

from mpwatch import rendezvous, wire
from mpwatch.asking import Asking
from mpwatch.errors import CodecError, MpwatchError, NoAnswer
from mpwatch.queries import AnyQuery, AnyReply, reply_decoder
from mpwatch.vocabulary import clean_text

ANSWER_S: Final = 3.0
ASK_AGAIN_S: Final = 0.5


class JobOver(MpwatchError):
    """The hub is gone and the job has ended: what there is to know is in the record."""


class LiveJob(Asking):
    """A running job, asked through its hub. Goes on by itself when the hub is replaced."""

    def __init__(self, run_directory: Path, timeout_s: float = ANSWER_S) -> None:
        """Connect to the hub of `run_directory`, which need not be there yet."""
        self._directory = run_directory
        self._runtime = rendezvous.runtime_directory(run_directory)
        self.timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            endpoint = rendezvous.watch_endpoint(self._runtime)
            self._socket = wire.watcher_socket(self._context, endpoint)
        except BaseException:
            self._context.term()
            raise

    def _ask(self, query: AnyQuery) -> AnyReply:
        """Ask until it is answered; again now and then, since a dying hub loses questions."""
        deadline = time.monotonic() + self.timeout_s
        parts = wire.message(wire.QUERY, msgspec.msgpack.encode(query))
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            reply = self._receive(query.id, min(left, ASK_AGAIN_S))
            if reply is not None:
                return reply
            if not hub_is_there(self._runtime) and job_is_over(self._directory):
                raise JobOver("the job has ended; its record has the rest")
        raise NoAnswer(f"the hub of {self._directory.name} did not answer in {self.timeout_s:g} s")

    def _receive(self, id: int, seconds: float) -> AnyReply | None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                return None
            try:
                data = wire.open_message(self._socket.recv_multipart(zmq.NOBLOCK), wire.REPLY)
                reply = reply_decoder.decode(data)
            except (zmq.Again, CodecError, msgspec.DecodeError):
                continue
            # A late answer to an earlier question is dropped.
            if reply.id == id:
                return reply
        return None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        self._context.term()


def hub_is_there(runtime: Path) -> bool:
    """Whether a hub holds its lock. Does not take the lock: that could turn a hub away."""
    try:
        words = (runtime / rendezvous.HUB_LOCK).read_text("ascii").split()
        pid, started = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return False
    return rendezvous.is_alive(pid, started)


def out_of_reach(run_directory: Path) -> str | None:
    """Why the hub of a job that runs cannot be asked from here; None where it can."""
    run_file = rendezvous.read_json(run_directory / rendezvous.RUN_FILE) or {}
    host = rendezvous.foreign_host(run_file)
    if host is not None:
        return f"the job runs on {clean_text(host, 60)}"
    try:
        with (rendezvous.runtime_directory(run_directory) / rendezvous.HUB_LOCK).open("rb"):
            return None
    except PermissionError:
        return "the hub belongs to another user"
    except OSError:
        return None


def job_is_over(run_directory: Path) -> bool:
    """Whether nothing will follow: the keeper said so, or it and what it spawned are gone.

    On another machine nobody can look for processes: there, it has written nothing for long.
    """
    spawned: list[tuple[int, int | None]] = []
    for entry in rendezvous.read_json_lines(run_directory / rendezvous.KEEPER_FILE):
        if entry.get("event") == "ended":
            return True
        if entry.get("event") == "spawned" and isinstance(entry.get("pid"), int):
            spawned = [(entry["pid"], entry.get("start_time"))]
        if entry.get("event") == "exited":
            spawned = []
    run_file = rendezvous.read_json(run_directory / rendezvous.RUN_FILE) or {}
    if rendezvous.foreign_host(run_file) is not None:
        return not rendezvous.written_lately(run_directory)
    keeper = run_file.get("keeper")
    if isinstance(keeper, dict) and isinstance(keeper.get("pid"), int):
        spawned.append((keeper["pid"], keeper.get("start_time")))
    return not any(rendezvous.is_alive(pid, started) for pid, started in spawned)
