"""Answers watchers' queries from a history: one function for the live hub and for a replay.

Because both give the same frames under the same cursors, a watcher cannot tell them apart, and
the history it sees is the same by construction.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from mpwatch.numbered import Numbered
from mpwatch.queries import (
    AnyQuery,
    AnyReply,
    Changes,
    ChangesReply,
    ErrorReply,
    StepPoint,
    Steps,
    StepsReply,
    View,
    ViewReply,
)
from mpwatch.store import RunView

MAX_FRAMES: Final = 5000
# Well below what a message may be, whatever one frame weighs.
MAX_BYTES: Final = 2 << 20


class History(Protocol):
    """What both a hub's record and a reader's offer."""

    @property
    def history(self) -> str:
        """The name of this history; cursors of another one mean nothing here."""

    @property
    def newest(self) -> int:
        """The cursor of the newest event."""

    def view(self) -> RunView:
        """The folded state after the newest event."""

    def frames_after(self, after: int, limit: int) -> Sequence[Numbered]:
        """Up to `limit` (cursor, frame) pairs after `after`, oldest first."""

    def steps(self, first: int, last: int | None, points: int) -> tuple[list[StepPoint], int]:
        """Points of the leading optimizer's steps, and how many steps one covers."""


def answer(query: AnyQuery, history: History) -> AnyReply:
    """The reply to `query`; commands are not a matter of history and are refused."""
    if isinstance(query, Changes):
        return _changes(query, history)
    if isinstance(query, View):
        view = history.view()
        return ViewReply(id=query.id, view=view, cursor=view.cursor)
    if isinstance(query, Steps):
        points, rolled_up = history.steps(max(1, query.first), query.last, query.points)
        return StepsReply(id=query.id, points=tuple(points), rolled_up=rolled_up)
    return ErrorReply(id=query.id, reason="a record takes no commands: the job is not running")


def _changes(query: Changes, history: History) -> ChangesReply:
    after = max(0, query.after)
    found = history.frames_after(after, max(1, min(query.limit, MAX_FRAMES)))
    frames: list[tuple[int, msgspec.Raw]] = []
    size = 0
    for cursor, frame in found:
        size += len(frame)
        if frames and size > MAX_BYTES:
            break
        frames.append((cursor, msgspec.Raw(frame)))
    cursor = frames[-1][0] if frames else after
    missing = cursor - after - len(frames)
    return ChangesReply(
        id=query.id,
        frames=tuple(frames),
        cursor=cursor,
        newest=history.newest,
        history=history.history,
        missing=missing,
    )
