"""A record with a clock of its own, and what a reader gets back from one."""

from pathlib import Path

from mpwatch import codec
from mpwatch.events import Event
from mpwatch.numbered import decoded
from mpwatch.record import Record
from mpwatch.recorded import Reader
from tests.support.hub_runs import RUN, frame


class Writer:
    """A record with a clock of its own; `tell` numbers events as a hub does."""

    def __init__(self, path: Path | None) -> None:
        self.record = Record(path, RUN)
        self.sequence = 0
        self.now = 1000.0

    def tell(self, *events: Event, attempt: int = 1, rank: int = 0) -> None:
        for event in events:
            encoded = frame(event, self.sequence, attempt=attempt, rank=rank)
            self.sequence += 1
            self.record.append(encoded, codec.decode_frame(encoded), event)

    def commit(self) -> bool:
        self.now += 1.0
        return self.record.commit(self.now)

    def close(self) -> None:
        self.record.close(self.now)


def events_of(path: Path) -> list[tuple[int, Event]]:
    reader = Reader(path)
    try:
        found, after = [], 0
        while frames := reader.frames_after(after, 997):
            found += [(cursor, event) for cursor, _, event in decoded(frames)]
            after = frames[-1][0]
        return found
    finally:
        reader.close()
