"""Events with their cursors, as they travel from records and hubs to watchers."""

import contextlib
from collections.abc import Iterable, Iterator

from mpwatch import codec
from mpwatch.codec import Frame
from mpwatch.errors import CodecError
from mpwatch.events import Event

# A cursor, and the encoded frame of the event that it numbers.
Numbered = tuple[int, bytes]


def decoded(frames: Iterable[Numbered]) -> Iterator[tuple[int, Frame, Event]]:
    """Decode frames; kinds that only a newer version knows are passed over."""
    for cursor, data in frames:
        with contextlib.suppress(CodecError):
            frame = codec.decode_frame(data)
            yield cursor, frame, codec.decode_event(frame.event)
