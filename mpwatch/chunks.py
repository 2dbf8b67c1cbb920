"""Events in the record: frames packed into compressed chunks, and taken out again by cursor."""

import sqlite3
import zlib
from collections.abc import Iterable
from typing import Final

from mpwatch import codec
from mpwatch.errors import CodecError
from mpwatch.numbered import Numbered

FRAMES_PER_CHUNK: Final = 250
MAX_CHUNK_BYTES: Final = 1 << 20


def pack(frames: Iterable[bytes]) -> bytes:
    """Frames of consecutive cursors as the content of one chunk."""
    return zlib.compress(codec.encode_batch(frames), 1)


def read_frames(connection: sqlite3.Connection, after: int, limit: int) -> list[Numbered]:
    """Up to `limit` (cursor, frame) pairs after cursor `after`, oldest first.

    Raises:
        sqlite3.Error: the record is damaged.
    """
    frames: list[Numbered] = []
    rows = connection.execute(
        "SELECT first_cursor, frames FROM chunks WHERE last_cursor > ? AND first_cursor >="
        " coalesce((SELECT max(first_cursor) FROM chunks WHERE first_cursor <= ?), 0)"
        " ORDER BY first_cursor",
        (after, after + 1),
    )
    for first_cursor, chunk in rows:
        frames += [pair for pair in unpack(first_cursor, chunk) if pair[0] > after]
        if len(frames) >= limit:
            break
    return frames[:limit]


def unpack(first_cursor: int, chunk: bytes) -> list[Numbered]:
    """The (cursor, frame) pairs of the chunk that begins at `first_cursor`.

    Raises:
        sqlite3.DatabaseError: the chunk is damaged.
    """
    try:
        frames = codec.split_batch(zlib.decompress(chunk))
    except (zlib.error, CodecError, TypeError) as error:
        raise sqlite3.DatabaseError(f"chunk {first_cursor}: {error}") from None
    return [(first_cursor + offset, bytes(frame)) for offset, frame in enumerate(frames)]
