"""What a watcher may ask a hub or a record, and what it gets back.

Watchers pull: "what changed after cursor c". The cursor is the record's sequence number of
events, so a hub, its successor and a replayed record all give the same history, without a gap or
a duplicate. One watcher message is one query; one reply carries the query's `id`.
"""

from typing import Final

import msgspec

from mpwatch.commands import CommandRequest
from mpwatch.store import RunView


class Query(msgspec.Struct, frozen=True, kw_only=True, tag_field="ask", tag=str.lower):
    """Base of all queries. `id` is chosen by the watcher and comes back in the reply."""

    id: int


class Changes(Query, frozen=True, kw_only=True):
    """The events after cursor `after` (0: from the start), at most `limit` of them."""

    after: int = 0
    limit: int = 1000


class View(Query, frozen=True, kw_only=True):
    """The folded state of the run: everything `show` prints."""


class Steps(Query, frozen=True, kw_only=True):
    """History of the leading optimizer's steps `first`..`last` in at most `points` points.

    `last` None means up to the newest. Points come from roll-ups where there are too many steps.
    """

    first: int = 1
    last: int | None = None
    points: int = 1000


class Send(Query, frozen=True, kw_only=True):
    """Hand a command to the job. The reply comes at once; its outcome is an event (and in View)."""

    request: CommandRequest


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", tag=str.lower):
    """Base of all replies; `id` repeats the query's."""

    id: int


class ChangesReply(Reply, frozen=True, kw_only=True):
    """`frames` are (cursor, encoded frame) pairs in order; `cursor` is where to go on from.

    `newest` is the newest cursor the answerer has: `cursor < newest` says "ask again at once".
    `history` names the history that cursors count in: another name (a hub without a record was
    replaced) says "start again from 0". `missing` events after `after` are no longer there.
    """

    frames: tuple[tuple[int, msgspec.Raw], ...]
    cursor: int
    newest: int
    history: str = ""
    missing: int = 0


class ViewReply(Reply, frozen=True, kw_only=True):
    """The folded state after event `cursor`."""

    view: RunView
    cursor: int


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    """One point of a plot: `count` steps from `first_step`, their extremes and last values."""

    first_step: int
    count: int
    skipped: int
    loss_min: float | None
    loss_mean: float | None
    loss_max: float | None
    loss_scale_min: float | None
    loss_scale_last: float | None
    grad_norm_max: float | None
    duration_s: float | None
    time: float


class StepsReply(Reply, frozen=True, kw_only=True):
    """Points in order of steps; `rolled_up` is how many steps one point covers at most."""

    points: tuple[StepPoint, ...]
    rolled_up: int


class SendReply(Reply, frozen=True, kw_only=True):
    """`accepted` False: refused at once, with the reason; True: the outcome event will follow."""

    accepted: bool
    reason: str = ""


class ErrorReply(Reply, frozen=True, kw_only=True):
    """The query could not be answered."""

    reason: str


_QUERIES = Changes | View | Steps | Send
_REPLIES = ChangesReply | ViewReply | StepsReply | SendReply | ErrorReply
AnyQuery = _QUERIES
AnyReply = _REPLIES
query_decoder: Final = msgspec.msgpack.Decoder(_QUERIES)
reply_decoder: Final = msgspec.msgpack.Decoder(_REPLIES)
