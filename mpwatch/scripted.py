"""A job made of given frames: what tests of watchers drive screens and verbs with."""

import time
from collections.abc import Sequence

from mpwatch import codec, commands
from mpwatch.answers import answer
from mpwatch.asking import Asking
from mpwatch.commands import Command
from mpwatch.queries import AnyQuery, AnyReply, Send, SendReply
from mpwatch.record import Record


class ScriptedJob(Asking):
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
