"""How events and commands become bytes: versioned MessagePack frames, and back.

Pure. Bytes from outside are never trusted: every way in checks size, version, shape and kind and
raises `CodecError` with the category to count. Wire, record and replay carry identical frames.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from mpwatch.errors import CodecError
from mpwatch.events import KINDS, Event

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 0
PROTOCOL: Final = PROTOCOL_MAJOR * 1000 + PROTOCOL_MINOR

MAX_FRAME_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_FRAMES_PER_MESSAGE: Final = 20_000


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The envelope of one event, encoded as an array so that it stays small.

    `sequence` counts from 0 per (attempt, rank); the hub's own frames have rank -1. `time` is
    seconds since the epoch on the sender's clock. `event` is the encoded event, kept as it came.
    """

    version: int
    run: str
    attempt: int
    rank: int
    sequence: int
    time: float
    event: msgspec.Raw


class _Kind(msgspec.Struct):
    kind: str


HUB_RANK: Final = -1

_encoder: Final = msgspec.msgpack.Encoder()
_frame_decoder: Final = msgspec.msgpack.Decoder(Frame)
_batch_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind_decoder: Final = msgspec.msgpack.Decoder(_Kind)
_event_decoders: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}


def encode_frame(
    event: Event, *, run: str, attempt: int, rank: int, sequence: int, time: float
) -> bytes:
    """Encode `event` in its envelope."""
    body = msgspec.Raw(_encoder.encode(event))
    return _encoder.encode(Frame(PROTOCOL, run, attempt, rank, sequence, time, body))


def encode_batch(frames: Iterable[bytes]) -> bytes:
    """Pack encoded frames into the payload of one message (or one chunk of the record)."""
    return _encoder.encode([msgspec.Raw(frame) for frame in frames])


def split_batch(payload: bytes) -> list[msgspec.Raw]:
    """Take a batch apart without decoding its frames.

    Raises:
        CodecError: "oversized" or "malformed".
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise CodecError("oversized", f"message of {len(payload)} bytes")
    try:
        frames = _batch_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CodecError("malformed", str(error)) from None
    if len(frames) > MAX_FRAMES_PER_MESSAGE:
        raise CodecError("oversized", f"message of {len(frames)} frames")
    return frames


def decode_frame(data: bytes | msgspec.Raw) -> Frame:
    """Decode an envelope; the event inside stays encoded.

    Raises:
        CodecError: "oversized", "malformed" or "version".
    """
    if memoryview(data).nbytes > MAX_FRAME_BYTES:
        raise CodecError("oversized", f"frame of {memoryview(data).nbytes} bytes")
    try:
        frame = _frame_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError("malformed", str(error)) from None
    if frame.version // 1000 != PROTOCOL_MAJOR:
        raise CodecError(
            "version", f"protocol {frame.version // 1000}; this is protocol {PROTOCOL_MAJOR}"
        )
    return frame


def decode_event(raw: bytes | msgspec.Raw) -> Event:
    """Decode the event of a frame.

    Raises:
        CodecError: "unknown" for a kind this version does not know, "malformed" otherwise.
    """
    try:
        kind = _kind_decoder.decode(raw).kind
        decoder = _event_decoders.get(kind)
        if decoder is None:
            raise CodecError("unknown", f"event kind {kind[:80]!r}")
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError("malformed", str(error)) from None


def decode_frames(frames: Sequence[bytes | msgspec.Raw]) -> list[tuple[Frame, Event]]:
    """Decode frames that this version wrote itself (a chunk of the record)."""
    decoded = []
    for data in frames:
        frame = decode_frame(data)
        decoded.append((frame, decode_event(frame.event)))
    return decoded
