"""Follows a run's events from a cursor on, through hubs that die and past the end of the job.

Gap-free and without duplicates: live hub, its successor and the record number events alike. What
was not kept (a run without a record) is said by `missed`.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mpwatch import rendezvous
from mpwatch.codec import Frame
from mpwatch.errors import MpwatchError, RecordUnreadable
from mpwatch.events import Event
from mpwatch.live import LiveJob, hub_is_there, job_is_over
from mpwatch.numbered import Numbered, decoded
from mpwatch.queries import ChangesReply

LOOK_EVERY_S: Final = 0.15
PER_REQUEST: Final = 2000
LIVE_ANSWER_S: Final = 2.0

Missed = Callable[[int], None]


def follow(
    run_directory: Path, after: int = 0, missed: Missed | None = None
) -> Iterator[tuple[int, Frame, Event]]:
    """Yield (cursor, frame, event) after cursor `after`, until the job has ended and all is told.

    Waits for what is still to come. `missed` is called with the number of events that are gone.

    Raises:
        RecordUnreadable: the job has ended and its record cannot be read.
    """
    following = _Following(run_directory, after, missed)
    try:
        yield from following.events()
    finally:
        following.close()


class _Following:
    def __init__(self, run_directory: Path, after: int, missed: Missed | None) -> None:
        self._directory = run_directory
        self._record = run_directory / rendezvous.RECORD_FILE
        self._runtime = rendezvous.runtime_directory(run_directory)
        self._after = after
        self._missed = missed
        self._history: str | None = None
        self._live: LiveJob | None = None

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def events(self) -> Iterator[tuple[int, Frame, Event]]:
        told = False
        while True:
            # In this order: what the last look finds was written before the hub was gone.
            over = not hub_is_there(self._runtime) and job_is_over(self._directory)
            reply = self._look(over)
            if reply is None:
                if over:
                    return
                time.sleep(LOOK_EVERY_S)
                continue
            frames = self._take(reply)
            told = told or bool(frames)
            yield from decoded(frames)
            if self._after < reply.newest and frames:
                continue
            if over:
                return
            time.sleep(LOOK_EVERY_S)

    def _look(self, over: bool) -> ChangesReply | None:
        """What is new: from the hub, or from the record where no hub answers."""
        if not over:
            if self._live is None:
                self._live = LiveJob(self._directory, LIVE_ANSWER_S)
            try:
                if hub_is_there(self._runtime):
                    return self._live.changes(self._after, PER_REQUEST)
            except MpwatchError:
                pass
        # Not needed while a hub answers, and slow to import.
        from mpwatch.replayed import ReplayedJob

        try:
            record = ReplayedJob(self._record)
        except RecordUnreadable:
            if over and self._history is None:
                raise
            return None
        try:
            return record.changes(self._after, PER_REQUEST)
        finally:
            record.close()

    def _take(self, reply: ChangesReply) -> list[Numbered]:
        if self._history is not None and reply.history != self._history:
            # A hub without a record was replaced: its events count from 1 again.
            self._history, self._after = reply.history, 0
            return []
        self._history = reply.history
        if reply.newest < self._after:
            # The end of this history was lost with a hub that could not write it.
            self._after = reply.newest
            return []
        if reply.missing and self._missed is not None:
            self._missed(reply.missing)
        self._after = reply.cursor
        return [(cursor, bytes(frame)) for cursor, frame in reply.frames]
