"""Whatever peers send, the hub counts it and goes on: made-up values, bytes, mutated frames."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch import wire
from mpwatch.codec import PROTOCOL
from mpwatch.events import KINDS, Heartbeat
from mpwatch.queries import Steps
from mpwatch.record import Record
from tests.core.test_codec import JUNK
from tests.support.hub_bench import T0, Bench, bound
from tests.support.hub_runs import RUN, frame, step

FIELDS = sorted({name for kind in KINDS.values() for name in kind.__struct_fields__})


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Record(None, RUN))
    yield bench
    bench.hub.finish(bench.now)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(max_size=80) | JUNK.map(msgspec.msgpack.encode), max_size=5), st.booleans()
)
def test_rubbish_on_either_socket_is_survived(parts: list[bytes], framed: bool) -> None:
    bench = Bench(Record(None, RUN))
    kinds = (wire.EVENTS, wire.QUERY)
    messages = [wire.message(kind, part) for kind in kinds for part in parts] if framed else [parts]
    for message in messages:
        bench.hub.on_agent_message(b"x", message, bench.now)
        bench.hub.on_watch_message(b"x", message, bench.now)
        bench.from_agent(*message)
    assert bench.view.cursor >= 1
    bench.hub.finish(bench.now)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(
        st.sampled_from(FIELDS),
        JUNK | st.integers(-(2**63), 2**64 - 1) | st.floats(),
        max_size=6,
    ),
    st.integers(-2, 5),
)  # fmt: skip
def test_events_with_odd_values_are_survived(kind: str, fields: dict[str, Any], rank: int) -> None:
    bench = Bench(Record(None, RUN))
    body = {"step": 1, "applied": True, "pid": 1, "process_start_time": None, **fields}
    for sequence in range(3):
        bench.from_agent(
            msgspec.msgpack.encode([PROTOCOL, RUN, 1, rank, sequence, T0, {**body, "kind": kind}])
        )
    view = bench.view
    assert "failed" not in view.rejected
    bench.ask(Steps(id=1))
    bench.hub.finish(bench.now)
    assert bench.hub.record.error is None


def test_a_hundred_thousand_random_frames_are_survived(bench: Bench) -> None:
    dice = random.Random(6)
    good = [frame(event, n) for n, event in enumerate([bound(), step(1), Heartbeat()])]
    sent = 0
    while sent < 100_000:
        batch = []
        for _ in range(250):
            data = bytearray(dice.choice(good) if dice.random() < 0.7 else dice.randbytes(40))
            for _ in range(dice.randint(0, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            batch.append(bytes(data))
        sent += len(batch)
        payload = b"\xdc" + len(batch).to_bytes(2, "big") + b"".join(batch)
        bench.hub.on_agent_message(b"a", wire.message(wire.EVENTS, payload), bench.now)
        for data in batch:
            bench.hub.on_agent_message(b"a", wire.message(wire.EVENTS, b"\x91" + data), bench.now)
            bench.hub.on_watch_message(b"w", wire.message(wire.QUERY, data), bench.now)
    view = bench.view
    assert view.rejected["malformed"] > 100_000
    assert "failed" not in view.rejected
    bench.say(0, step(77), attempt=10**6)  # newer than any attempt the dice made up
    assert bench.view.steps == 77
