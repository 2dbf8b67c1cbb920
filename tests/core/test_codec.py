"""Frames: the same bytes for ever, the same values back, and nothing from outside raises."""

import contextlib
import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch import codec
from mpwatch.errors import CodecError
from mpwatch.events import KINDS, Event, StepFinished
from tests.core.golden.make import EXAMPLES, FILE, encoded
from tests.support.hub_runs import frame, step


def test_golden_frames_are_encoded_as_ever() -> None:
    golden = json.loads(FILE.read_text("utf-8"))
    now = {
        str(type(event).__struct_config__.tag): encoded(event, n).hex()
        for n, event in enumerate(EXAMPLES)
    }
    assert now == golden, "the protocol changed: python -m tests.core.golden.make, and say why"


def test_golden_frames_cover_every_kind() -> None:
    assert {type(event) for event in EXAMPLES} == set(KINDS.values())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_golden_frames_give_their_values_back(event: Event) -> None:
    golden = json.loads(FILE.read_text("utf-8"))
    data = bytes.fromhex(golden[type(event).__struct_config__.tag])
    found = codec.decode_frame(data)
    assert (found.run, found.attempt, found.rank, found.time) == ("golden", 2, 1, 1800000000.125)
    # repr, since nan is not equal to itself.
    assert repr(codec.decode_event(found.event)) == repr(event)


def test_non_finite_numbers_survive() -> None:
    sent = step(1, loss=math.nan, grad_norm=math.inf, losses=(-math.inf,))
    found = codec.decode_event(codec.decode_frame(frame(sent, 0)).event)
    assert isinstance(found, StepFinished)
    assert math.isnan(found.loss or 0)
    assert (found.grad_norm, found.losses) == (math.inf, (-math.inf,))


def test_a_newer_minor_version_with_a_new_field_is_understood() -> None:
    body = {"kind": "heartbeat", "paused": True, "added_later": [1, 2]}
    envelope = [codec.PROTOCOL + 1, "r", 1, 0, 0, 1.0, body, "also added later"]
    found = codec.decode_frame(msgspec.msgpack.encode(envelope))
    assert repr(codec.decode_event(found.event)) == "Heartbeat(paused=True)"


def test_an_event_without_its_newer_fields_is_understood() -> None:
    body = msgspec.msgpack.encode({"kind": "step_finished", "step": 3, "applied": True})
    assert codec.decode_event(body) == StepFinished(step=3, applied=True)


@pytest.mark.parametrize(
    ("data", "category"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode([9000, "r", 1, 0, 0, 1.0, {}]), "version"),
        (msgspec.msgpack.encode({"run": "r"}), "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (b"x" * (codec.MAX_FRAME_BYTES + 1), "oversized"),
    ],
)
def test_bad_frames_have_a_category(data: bytes, category: str) -> None:
    with pytest.raises(CodecError) as refused:
        codec.decode_frame(data)
    assert refused.value.category == category


def test_an_unknown_kind_is_not_called_malformed() -> None:
    with pytest.raises(CodecError) as refused:
        codec.decode_event(msgspec.msgpack.encode({"kind": "moon_landed"}))
    assert refused.value.category == "unknown"


@pytest.mark.parametrize("payload", [b"x" * (codec.MAX_MESSAGE_BYTES + 1), b"", b"\x91", b"\xa1a"])
def test_bad_batches_raise_only_codec_errors(payload: bytes) -> None:
    with pytest.raises(CodecError):
        codec.split_batch(payload)


def test_a_batch_of_too_many_frames_is_refused() -> None:
    payload = codec.encode_batch([b"\xc0"] * (codec.MAX_FRAMES_PER_MESSAGE + 1))
    with pytest.raises(CodecError) as refused:
        codec.split_batch(payload)
    assert refused.value.category == "oversized"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9) | st.sampled_from(sorted(KINDS)),
    lambda inner: st.lists(inner, max_size=8)
    | st.dictionaries(st.sampled_from(["kind", "step", "id", "pid", "phase_s"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@given(st.binary(max_size=200) | JUNK.map(msgspec.msgpack.encode))
def test_whatever_comes_raises_nothing_but_codec_errors(data: bytes) -> None:
    for decode in (codec.decode_frame, codec.decode_event, codec.split_batch):
        with contextlib.suppress(CodecError):
            decode(data)
