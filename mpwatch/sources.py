"""The three kinds of job that a watcher can ask: live, recorded, scripted for tests.

One set of verbs (`mpwatch.client.JobSource`) over one query and its reply; the sources differ in
who answers. Every wait has a deadline. Watchers import `mpwatch.client`.
"""

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec
import zmq

from mpwatch import codec, commands, rendezvous, wire
from mpwatch.answers import answer
from mpwatch.commands import Command, CommandRequest
from mpwatch.errors import CodecError, MpwatchError, NoAnswer
from mpwatch.queries import (
    AnyQuery,
    AnyReply,
    Changes,
    ChangesReply,
    ErrorReply,
    Send,
    SendReply,
    Steps,
    StepsReply,
    View,
    ViewReply,
    reply_decoder,
)
from mpwatch.record import Record
from mpwatch.recorded import Reader
from mpwatch.store import CommandSeen, RunView

ANSWER_S: Final = 3.0
ASK_AGAIN_S: Final = 0.5
LOOK_FOR_OUTCOME_S: Final = 0.05

R = TypeVar("R", bound=msgspec.Struct)


class JobOver(MpwatchError):
    """The hub is gone and the job has ended: what there is to know is in the record."""


class _Asking:
    """The verbs of `JobSource` in terms of one query and its reply."""

    def _ask(self, query: AnyQuery) -> AnyReply:
        raise NotImplementedError

    def _next_id(self) -> int:
        self._last_id = getattr(self, "_last_id", 0) + 1
        return self._last_id

    def _answer(self, query: AnyQuery, kind: type[R]) -> R:
        reply = self._ask(query)
        if isinstance(reply, ErrorReply):
            raise MpwatchError(reply.reason)
        if not isinstance(reply, kind):
            raise NoAnswer(f"unexpected answer {type(reply).__name__}")
        return reply

    def changes(self, after: int = 0, limit: int = 1000) -> ChangesReply:
        query = Changes(id=self._next_id(), after=after, limit=limit)
        return self._answer(query, ChangesReply)

    def view(self) -> RunView:
        return self._answer(View(id=self._next_id()), ViewReply).view

    def steps(self, first: int = 1, last: int | None = None, points: int = 1000) -> StepsReply:
        query = Steps(id=self._next_id(), first=first, last=last, points=points)
        return self._answer(query, StepsReply)

    def send(self, command: Command, by: str = "person", id: str | None = None) -> str:
        request = CommandRequest(
            id=id or secrets.token_hex(8),
            command=msgspec.Raw(msgspec.msgpack.encode(command)),
            by=by,
        )
        reply = self._answer(Send(id=self._next_id(), request=request), SendReply)
        if not reply.accepted:
            raise MpwatchError(reply.reason)
        return request.id

    def outcome(self, id: str, timeout_s: float) -> CommandSeen:
        deadline = time.monotonic() + timeout_s
        while True:
            found = [seen for seen in self.view().commands if seen.id == id]
            if found and found[0].outcome is not None:
                return found[0]
            if time.monotonic() >= deadline:
                raise NoAnswer(
                    f"no outcome of {found[0].command if found else id} within {timeout_s:g} s;"
                    " it takes effect at the next boundary"
                )
            self._wait(LOOK_FOR_OUTCOME_S)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class LiveJob(_Asking):
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


class ReplayedJob(_Asking):
    """A job from its record alone; commands are refused."""

    def __init__(self, record: Path) -> None:
        """Open the record file.

        Raises:
            RecordUnreadable: with the one line to show.
        """
        self._reader = Reader(record)

    @property
    def damage(self) -> str | None:
        """One line on what of the record could not be read; None where all could."""
        return self._reader.damage

    def _ask(self, query: AnyQuery) -> AnyReply:
        return answer(query, self._reader)

    def outcome(self, id: str, timeout_s: float) -> CommandSeen:
        """The outcome as recorded; nothing more will come, so it does not wait."""
        return super().outcome(id, 0.0)

    def close(self) -> None:
        """Close the record."""
        self._reader.close()


class ScriptedJob(_Asking):
    """A job made of given frames, for tests of watchers: the hub's own history, in memory."""

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        """Begin with `frames`; more come by `feed`. Commands sent are kept in `sent`."""
        self._record = Record(None, "scripted")
        self.sent: list[tuple[str, Command]] = []
        self.feed(frames)

    def feed(self, frames: Sequence[bytes]) -> None:
        """Let these frames happen."""
        for frame, (envelope, event) in zip(frames, codec.decode_frames(frames), strict=True):
            self._record.append(frame, envelope, event)
        self._record.commit(time.time())

    def _ask(self, query: AnyQuery) -> AnyReply:
        if isinstance(query, Send):
            self.sent.append((query.request.id, commands.decode(query.request.command)))
            return SendReply(id=query.id, accepted=True)
        return answer(query, self._record)

    def close(self) -> None:
        """Forget everything."""
        self._record.close(time.time())


def hub_is_there(runtime: Path) -> bool:
    """Whether a hub holds its lock. Does not take the lock: that could turn a hub away."""
    try:
        words = (runtime / rendezvous.HUB_LOCK).read_text("ascii").split()
        pid, started = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return False
    return rendezvous.is_alive(pid, started)


def job_is_over(run_directory: Path) -> bool:
    """Whether nothing will follow: the keeper said so, or it and what it spawned are gone."""
    spawned: list[tuple[int, int | None]] = []
    for entry in rendezvous.read_json_lines(run_directory / rendezvous.KEEPER_FILE):
        if entry.get("event") == "ended":
            return True
        if entry.get("event") == "spawned" and isinstance(entry.get("pid"), int):
            spawned = [(entry["pid"], entry.get("start_time"))]
        if entry.get("event") == "exited":
            spawned = []
    keeper = (rendezvous.read_json(run_directory / rendezvous.RUN_FILE) or {}).get("keeper")
    if isinstance(keeper, dict) and isinstance(keeper.get("pid"), int):
        spawned.append((keeper["pid"], keeper.get("start_time")))
    return not any(rendezvous.is_alive(pid, started) for pid, started in spawned)
