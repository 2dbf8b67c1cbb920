"""ZeroMQ sockets and message shapes; the only module that knows both.

Agent (DEALER) to hub (ROUTER): `[MAGIC, b"events", batch]` up, `[MAGIC, b"command", request]`
down. Watcher (DEALER) to hub (ROUTER): `[MAGIC, b"query", query]` and `[MAGIC, b"reply", reply]`.
Never blocks; who sends decides what to do when a queue is full.
"""

import os
from typing import Final

import zmq

from mpwatch.codec import MAX_MESSAGE_BYTES
from mpwatch.errors import CodecError

MAGIC: Final = b"mpw1"
EVENTS: Final = b"events"
COMMAND: Final = b"command"
QUERY: Final = b"query"
REPLY: Final = b"reply"

# Messages, not events: a batch is a message. At 5 batches a second this is minutes of silence.
SEND_HIGH_WATER_MARK: Final = 1000
# Per peer of a hub. What a busy hub has not read waits in the agent, whose queue is bounded too.
RECEIVE_HIGH_WATER_MARK: Final = 100


def agent_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The agent's DEALER, connected to `endpoint`, which need not exist yet."""
    return _dealer(context, endpoint)


def watcher_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A watcher's DEALER, connected to `endpoint`."""
    return _dealer(context, endpoint)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.connect(endpoint)
    return socket


def hub_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """One of the hub's ROUTERs, bound at `endpoint` (the lock is held: binding steals silently).

    An oversized message ends its sender's connection inside libzmq; a peer that is gone or slow
    makes a send fail instead of vanishing.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
    before = os.umask(0o077)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)
    return socket


def message(kind: bytes, payload: bytes) -> list[bytes]:
    """The parts of one message."""
    return [MAGIC, kind, payload]


def open_message(parts: list[bytes], kind: bytes) -> bytes:
    """The payload of a message of `kind`.

    Raises:
        CodecError: another protocol ("version"), another kind ("unknown"), other shape or size.
    """
    if len(parts) != 3:
        raise CodecError("malformed", f"message of {len(parts)} parts")
    if parts[0] != MAGIC:
        raise CodecError(
            "version" if parts[0].startswith(b"mpw") else "malformed", "foreign message"
        )
    if parts[1] != kind:
        raise CodecError("unknown", f"message kind {parts[1][:20]!r}")
    if len(parts[2]) > MAX_MESSAGE_BYTES:
        raise CodecError("oversized", f"message of {len(parts[2])} bytes")
    return parts[2]
