"""A hub without sockets, with peers that speak in values and a clock that stands still."""

from typing import Any

import msgspec

from mpwatch import codec, wire
from mpwatch.commands import Command, CommandRequest
from mpwatch.events import AgentBound, Event
from mpwatch.hub import Hub, Outgoing
from mpwatch.numbered import decoded
from mpwatch.queries import Changes, Send, SendReply, View, reply_decoder
from mpwatch.record import Record
from mpwatch.store import CommandSeen, RunView
from tests.support.hub_runs import RUN, frame

T0 = 1_800_000_000.0


class Bench:
    """A hub with peers that speak in values and a clock that stands still unless moved."""

    def __init__(self, record: Record) -> None:
        self.hub = Hub(RUN, record)
        self.now = T0
        self.hub.start(1, self.now)

    def from_agent(self, *frames: bytes, identity: bytes = b"agent") -> list[Outgoing]:
        parts = wire.message(wire.EVENTS, codec.encode_batch(frames))
        return self.hub.on_agent_message(identity, parts, self.now)

    def say(self, first: int, *told: Event, identity: bytes = b"agent", **place: Any) -> list[Any]:
        """Send events with sequence numbers from `first`; the commands that come back."""
        frames = [frame(event, first + n, **place) for n, event in enumerate(told)]
        return [order(out) for out in self.from_agent(*frames, identity=identity)]

    def ask(self, query: Any) -> tuple[Any, list[Any]]:
        parts = wire.message(wire.QUERY, msgspec.msgpack.encode(query))
        *orders, reply = self.hub.on_watch_message(b"watcher", parts, self.now)
        assert not reply.to_agent
        assert reply.parts[:3] == [b"watcher", wire.MAGIC, wire.REPLY]
        return reply_decoder.decode(reply.parts[3]), [order(out) for out in orders]

    def send(self, command: Command, id: str = "c1") -> tuple[SendReply, list[Any]]:
        raw = msgspec.Raw(msgspec.msgpack.encode(command))
        reply, orders = self.ask(Send(id=1, request=CommandRequest(id=id, command=raw)))
        assert isinstance(reply, SendReply)
        return reply, orders

    def tick(self, later_s: float = 0.0) -> None:
        """Let time go by in small ticks, as the loop does."""
        end = self.now + later_s
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.hub.tick(self.now)
        self.hub.tick(self.now)

    @property
    def view(self) -> RunView:
        view: RunView = self.ask(View(id=1))[0].view
        return view

    def command(self, id: str = "c1") -> CommandSeen:
        return next(seen for seen in self.view.commands if seen.id == id)

    def history(self) -> list[Event]:
        found: list[Event] = []
        after = 0
        while True:
            reply, _ = self.ask(Changes(id=1, after=after, limit=5000))
            found += [event for _, _, event in decoded((c, bytes(f)) for c, f in reply.frames)]
            after = reply.cursor
            if after == reply.newest:
                return found


def order(out: Outgoing) -> tuple[bytes, str, str]:
    """Who is told to do what, under which id."""
    assert out.to_agent
    identity, *parts = out.parts
    request = msgspec.msgpack.decode(wire.open_message(parts, wire.COMMAND), type=CommandRequest)
    return identity, msgspec.msgpack.decode(request.command)["command"], request.id


def bound(pid: int = 10, **fields: Any) -> AgentBound:
    return AgentBound(pid=pid, process_start_time=1, **fields)
