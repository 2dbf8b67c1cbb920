"""Sockets and messages: shapes, sizes, who can reach them."""

import os
import stat
from pathlib import Path

import pytest
import zmq

from mpwatch import codec, wire
from mpwatch.errors import CodecError


@pytest.fixture
def context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context()


def test_a_message_goes_up_and_a_command_comes_down(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    endpoint = f"ipc://{tmp_path}/a"
    with (
        context,
        wire.hub_socket(context, endpoint) as hub,
        wire.agent_socket(context, endpoint) as agent,
    ):
        agent.send_multipart(wire.message(wire.EVENTS, b"payload"))
        identity, *parts = hub.recv_multipart()
        assert wire.open_message(parts, wire.EVENTS) == b"payload"
        hub.send_multipart([identity, *wire.message(wire.COMMAND, b"order")])
        assert wire.open_message(agent.recv_multipart(), wire.COMMAND) == b"order"


def test_a_socket_is_for_its_owner_alone(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with context, wire.hub_socket(context, f"ipc://{tmp_path}/a"):
        assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) & 0o077 == 0


def test_an_agent_connects_before_its_hub_is_there(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    endpoint = f"ipc://{tmp_path}/a"
    with context, wire.agent_socket(context, endpoint) as agent:
        agent.send_multipart(wire.message(wire.EVENTS, b"early"), zmq.NOBLOCK)
        with wire.hub_socket(context, endpoint) as hub:
            assert hub.poll(10_000)
            assert hub.recv_multipart()[-1] == b"early"


def test_an_oversized_message_ends_its_connection_and_nobody_elses(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    endpoint = f"ipc://{tmp_path}/a"
    with (
        context,
        wire.hub_socket(context, endpoint) as hub,
        wire.agent_socket(context, endpoint) as big,
        wire.agent_socket(context, endpoint) as other,
    ):
        big.send_multipart(wire.message(wire.EVENTS, b"x" * (codec.MAX_MESSAGE_BYTES + 1)))
        other.send_multipart(wire.message(wire.EVENTS, b"fine"))
        assert hub.poll(10_000)
        assert hub.recv_multipart()[-1] == b"fine"
        assert not hub.poll(50)


def test_a_peer_that_is_gone_makes_the_send_fail(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with (
        context,
        wire.hub_socket(context, f"ipc://{tmp_path}/a") as hub,
        pytest.raises(zmq.ZMQError),
    ):
        hub.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)


@pytest.mark.parametrize(
    ("parts", "category"),
    [
        ([], "malformed"),
        ([b"mpw1", b"events"], "malformed"),
        ([b"mpw2", b"events", b""], "version"),
        ([b"http", b"events", b""], "malformed"),
        ([b"mpw1", b"query", b""], "unknown"),
        ([b"mpw1", b"events", b"x" * (codec.MAX_MESSAGE_BYTES + 1)], "oversized"),
    ],
)
def test_messages_of_another_shape_have_a_category(parts: list[bytes], category: str) -> None:
    with pytest.raises(CodecError) as refused:
        wire.open_message(parts, wire.EVENTS)
    assert refused.value.category == category
