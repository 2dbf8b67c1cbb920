"""The verbs that watchers use, in terms of one query and its reply; who answers is a subclass's.

Base of `mpwatch.live`, `mpwatch.replayed` and `mpwatch.scripted`; watchers import
`mpwatch.client`. Every wait has a deadline.
"""

import secrets
import time
from typing import Final, Self, TypeVar

import msgspec

from mpwatch.commands import Command, CommandRequest
from mpwatch.errors import MpwatchError, NoAnswer
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
)
from mpwatch.store import CommandSeen, RunView

LOOK_FOR_OUTCOME_S: Final = 0.1

R = TypeVar("R", bound=msgspec.Struct)


class Asking:
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
