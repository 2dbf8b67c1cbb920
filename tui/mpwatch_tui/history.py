"""The cursor of one watcher: which events of an answer are new, and what happened to the rest.

Gap-free and without duplicates across hubs and the record, since all number the same events; what
is gone is said. The same rules as `mpwatch.following`, one answer at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mpwatch.numbered import Numbered
from mpwatch.queries import ChangesReply


class News(NamedTuple):
    """What an answer brought. `missing` events before `frames` are gone for good.

    `anew`: the history was replaced by another one (a hub without a record died); ask again.
    `behind`: there is more to ask for at once.
    """

    frames: Sequence[Numbered] = ()
    missing: int = 0
    anew: bool = False
    behind: bool = False


class History:
    """Where this watcher stands."""

    def __init__(self, after: int = 0) -> None:
        """Begin behind event `after`."""
        self.after = after
        self._name: str | None = None

    def take(self, reply: ChangesReply, final: bool) -> News:
        """The news in an answer to "what is after `self.after`".

        `final`: whoever answered is the only one who may number events from now on (a hub, or the
        record of a job that is over); not so the record beside a silent hub, which may lag.
        """
        if self._name is not None and reply.history != self._name:
            self._name, self.after = reply.history, 0
            return News(anew=True, behind=True)
        self._name = reply.history
        if reply.newest < self.after:
            if final:
                # The end of this history was lost with a hub that could not write it.
                self.after = reply.newest
            return News()
        frames = [(cursor, bytes(frame)) for cursor, frame in reply.frames]
        self.after = reply.cursor
        return News(frames, reply.missing, behind=bool(frames) and reply.cursor < reply.newest)
