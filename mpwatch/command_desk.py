"""Where commands wait: taken from watchers, handed to every agent, kept until each has answered.

No socket and no clock; part of `mpwatch.hub`. What is pending is read from the fold, so a hub that
takes over hands it on again, and an agent answers a repeated id without running it twice.
"""

from typing import Any, Final

import msgspec

from mpwatch import commands, wire
from mpwatch.commands import CommandRequest
from mpwatch.events import CommandRefused, CommandRequested
from mpwatch.fold_state import CommandState, FoldState
from mpwatch.ingest import MAX_ID
from mpwatch.queries import Send, SendReply
from mpwatch.vocabulary import clean_text

MAX_PENDING: Final = 100
JOB_ENDED: Final = "the job ended before the command took effect"

_encoder: Final = msgspec.msgpack.Encoder()


class CommandDesk:
    """Pending commands, and which connected agent has been given which."""

    def __init__(self, state: FoldState) -> None:
        """Read what is pending from `state`, which the fold goes on changing."""
        self._state = state
        self._agents: dict[int, bytes] = {}  # by rank
        self._given: dict[bytes, set[str]] = {}  # by identity

    def take(self, query: Send, closed: str | None) -> tuple[SendReply, CommandRequested | None]:
        """Accept or refuse a watcher's command; the event says that a new one was accepted.

        A known id is accepted again and leads to nothing. `closed` says why none is taken now.
        """
        request = query.request
        try:
            command = commands.decode(request.command)
        except msgspec.MsgspecError as error:
            return _refused(query, str(error)), None
        if not request.id or len(request.id) > MAX_ID or request.id != clean_text(request.id):
            return _refused(query, "a request id is 1 to 100 printable characters"), None
        if request.id in self._state.commands:
            return SendReply(id=query.id, accepted=True), None
        if closed is not None:
            return _refused(query, closed), None
        if len(self._pending()) >= MAX_PENDING:
            return _refused(query, f"{MAX_PENDING} commands wait already"), None
        arguments: dict[str, Any] = commands.arguments_of(command)
        event = CommandRequested(
            id=request.id,
            command=commands.name_of(command),
            by=clean_text(request.by, 50),
            arguments=arguments,
        )
        return SendReply(id=query.id, accepted=True), event

    def forward(self, id: str) -> list[list[bytes]]:
        """Messages that give command `id` to every agent that is there."""
        command = self._state.commands[id]
        return [self._give(identity, command) for identity in self._agents.values()]

    def reached(self, identity: bytes, rank: int) -> list[list[bytes]]:
        """An agent spoke: messages with the pending commands that it has not been given."""
        before = self._agents.get(rank)
        if before != identity:
            self.lost(before)
            self._agents[rank] = identity
        given = self._given.get(identity, set())
        return [self._give(identity, each) for each in self._pending() if each.id not in given]

    def lost(self, identity: bytes | None) -> None:
        """That connection is gone; its agent shows up again under another identity."""
        self._given.pop(identity or b"", None)
        for rank in [rank for rank, known in self._agents.items() if known == identity]:
            del self._agents[rank]

    def refusals(self) -> list[CommandRefused]:
        """The outcome of everything that is pending when the job has ended."""
        return [
            CommandRefused(id=each.id, command=each.command, reason=JOB_ENDED)
            for each in self._pending()
        ]

    def _pending(self) -> list[CommandState]:
        return [each for each in self._state.commands.values() if each.outcome is None]

    def _give(self, identity: bytes, command: CommandState) -> list[bytes]:
        self._given.setdefault(identity, set()).add(command.id)
        words = {"command": command.command, **command.args}
        request = CommandRequest(
            id=command.id, command=msgspec.Raw(_encoder.encode(words)), by=command.by
        )
        return [identity, *wire.message(wire.COMMAND, _encoder.encode(request))]


def _refused(query: Send, reason: str) -> SendReply:
    return SendReply(id=query.id, accepted=False, reason=clean_text(reason, 500))
