"""Events on their way out: collected as they happen, encoded and sent in batches.

Bounded and non-blocking: when the hub is gone or stopped, events are dropped and counted, and the
count is itself an event. A send costs 200 us after real work, so batches wait up to 200 ms.
"""

import time
from collections import deque

import zmq

from mpwatch import codec, wire
from mpwatch.errors import CodecError
from mpwatch.events import Event, EventsDropped

BATCH_INTERVAL_S = 0.2
MAX_WAITING = 10_000
EVENTS_PER_BATCH = 500


class Outbox:
    """The agent's end of the wire: events out, commands in."""

    def __init__(self, endpoint: str, run: str, attempt: int, rank: int, sequence: int = 0) -> None:
        """Connect to `endpoint`, which need not exist yet; `sequence` continues a predecessor."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        self._socket = wire.agent_socket(self._context, endpoint)
        self._run, self._attempt, self._rank = run, attempt, rank
        self._waiting: deque[tuple[float, Event]] = deque()
        self._dropped = 0
        self._dropped_unsaid = 0
        self._last_send = 0.0
        self.sequence = sequence

    def put(self, event: Event, moment: float | None = None) -> None:
        """Take an event of `moment` (None: now); drops it, and counts, when too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            self._dropped_unsaid += 1
            return
        self._waiting.append((time.time() if moment is None else moment, event))

    def due(self, now: float) -> bool:
        """Whether it is time for the next batch; `now` is a monotonic clock."""
        return now - self._last_send >= BATCH_INTERVAL_S

    def send(self, now: float) -> None:
        """Encode and send what waits, without blocking; keeps it when the queue is full."""
        self._last_send = now
        while self._waiting and self._can_send():
            frames, taken = self._encode()
            parts = wire.message(wire.EVENTS, codec.encode_batch(frames))
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            for _ in range(taken):
                self._waiting.popleft()
            self.sequence += len(frames)
            if len(frames) > taken:
                self._dropped_unsaid = 0

    def _can_send(self) -> bool:
        """Whether the queue has room: encoding for nobody would cost milliseconds a batch."""
        return self._context is not None and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def _encode(self) -> tuple[list[bytes], int]:
        taken = min(len(self._waiting), EVENTS_PER_BATCH)
        batch = [self._waiting[index] for index in range(taken)]
        if self._dropped_unsaid:
            note = EventsDropped(count=self._dropped_unsaid, total=self._dropped)
            batch.append((time.time(), note))
        frames = [
            codec.encode_frame(
                event,
                run=self._run,
                attempt=self._attempt,
                rank=self._rank,
                sequence=self.sequence + offset,
                time=moment,
            )
            for offset, (moment, event) in enumerate(batch)
        ]
        return frames, taken

    def look(self, wait_s: float = 0.0) -> bytes | None:
        """One command request that has arrived, or None; waits at most `wait_s`."""
        if self._context is None:
            return None
        try:
            if wait_s:
                self._socket.poll(int(wait_s * 1000))
            # Cheaper than to be told by an exception.
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return None
            return wire.open_message(self._socket.recv_multipart(zmq.NOBLOCK), wire.COMMAND)
        except (zmq.ZMQError, CodecError):
            return None

    def holds_descriptor(self, low: int, high: int) -> bool:
        """Whether the socket's descriptor is within `low`..`high` - 1."""
        return self._context is not None and low <= int(self._socket.get(zmq.FD)) < high

    def close(self, linger_s: float) -> None:
        """Send what waits and close; waits at most `linger_s` for the hub to take it."""
        if self._context is None:
            return
        self.send(time.perf_counter())
        context, self._context = self._context, None
        self._socket.close(linger=int(linger_s * 1000))
        context.term()

    def abandon(self) -> None:
        """Forget the socket in a forked child; the parent owns it, so it is not closed."""
        _abandoned.append((self._context, self._socket))
        self._context = None
        self._waiting.clear()


# Keeps a forked child's copies alive: collecting them would run libzmq's clean-up in the child.
_abandoned: list[object] = []
