"""The hub without its sockets: takes in what agents say, answers watchers, hands on commands.

Messages come in and go out as lists of bytes and time comes as an argument, so every rule here
can be tested without a loop; `mpwatch.hub_process` feeds it. Nothing that a peer sends raises:
what cannot be used is counted by category and shown in the view as `rejected`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from mpwatch import codec, ingest, wire
from mpwatch.answers import answer
from mpwatch.codec import HUB_RANK, Frame
from mpwatch.command_desk import CommandDesk
from mpwatch.errors import CodecError
from mpwatch.events import (
    Event,
    FramesMissing,
    HubStarted,
    JobExited,
    JobRecovered,
    JobStalled,
    JobStarted,
)
from mpwatch.fold_view import recent_step_s
from mpwatch.queries import (
    AnyReply,
    Changes,
    ErrorReply,
    Send,
    query_decoder,
)
from mpwatch.record import Record
from mpwatch.vocabulary import clean_text

STALL_FLOOR_S: Final = 30.0
STALL_STEPS: Final = 10.0
# A clock that moved this far between two looks: this hub was stopped, or the clock was set.
CLOCK_JUMP_S: Final = 5.0
# Watchers that ask all the time do not make the record commit more often than this.
COMMIT_GAP_S: Final = 0.02

_encoder: Final = msgspec.msgpack.Encoder()


class Outgoing(msgspec.Struct, frozen=True):
    """A message to one peer: on the agents' socket or on the watchers'."""

    to_agent: bool
    parts: list[bytes]


class Hub:
    """One run's hub. Hands out what is committed, so that its successor agrees with it."""

    def __init__(
        self, run: str, record: Record, trouble: Callable[[Exception], None] = lambda _: None
    ) -> None:
        """Serve `run` from `record`, which may hold the beginning of it already.

        `trouble` is told of exceptions that no message should cause, after they were counted.
        """
        self.trouble = trouble
        self.run = run
        self.record = record
        self.desk = CommandDesk(record.fold.state)
        self._attempt = max((each.n for each in record.fold.state.attempts), default=1)
        # Silence that counts as a stall, in seconds; ten steps' worth if that is more.
        self.stall_after_s = STALL_FLOOR_S
        self._heard_at = 0.0
        self._ticked_at: float | None = None

    # --- the hub's own events -------------------------------------------------------------

    def start(self, pid: int, now: float) -> None:
        """Say that this hub took over."""
        self._heard_at = now
        self.say(HubStarted(pid=pid, resumed_after=self.record.newest), now)

    def say(self, event: Event, now: float) -> None:
        """Record an event of the hub itself."""
        frame = Frame(
            codec.PROTOCOL,
            self.run,
            self._attempt,
            HUB_RANK,
            self.record.fold.state.hub_sequence + 1,
            now,
            msgspec.Raw(_encoder.encode(event)),
        )
        self.record.append(_encoder.encode(frame), frame, event)

    def job_started(self, event: JobStarted, attempt: int, at: float, now: float) -> None:
        """The keeper spawned the script; said again by a keeper's file that is read again."""
        known = {each.n: each for each in self.record.fold.state.attempts}
        if attempt in known and known[attempt].pid is not None:
            return
        self._attempt = attempt
        self._heard_at = now
        self.say(event, at)

    def job_exited(self, event: JobExited, attempt: int, at: float) -> None:
        """The keeper's child ended: commands that wait can have no effect any more."""
        known = {each.n: each for each in self.record.fold.state.attempts}
        if attempt in known and known[attempt].ended_at is not None:
            return
        self._attempt = attempt
        self.say(event, at)
        for refusal in self.desk.refusals():
            self.say(refusal, at)

    def job_is_over(self) -> bool:
        """Whether the newest attempt has ended."""
        attempts = self.record.fold.state.attempts
        return bool(attempts) and attempts[-1].ended_at is not None

    def finish(self, now: float, over: bool = True) -> None:
        """Commit and close. When the job is `over`, no command stays without an outcome."""
        if over:
            for refusal in self.desk.refusals():
                self.say(refusal, now)
        self.record.close(now)

    # --- from agents ----------------------------------------------------------------------

    def on_agent_message(
        self, identity: bytes, parts: Sequence[bytes], now: float
    ) -> list[Outgoing]:
        """Take in a batch of events; the answer is what waits for this agent."""
        try:
            frames = codec.split_batch(wire.open_message(list(parts), wire.EVENTS))
        except CodecError as error:
            self.record.fold.reject(error.category)
            return []
        rank: int | None = None
        for data in frames:
            try:
                rank = self._ingest(data, now)
            except CodecError as error:
                self.record.fold.reject(error.category)
            except Exception as error:
                # The rest of the batch is as good as before.
                self.record.fold.reject("failed")
                self.trouble(error)
        if rank is None or self.job_is_over():
            return []
        return self._to_agent(self.desk.reached(identity, rank))

    def _ingest(self, data: msgspec.Raw, now: float) -> int:
        fold = self.record.fold
        frame = codec.decode_frame(data)
        ingest.check_frame(frame, self.run, fold.state)
        event, unusable = _event_of(frame)
        missing = ingest.missing_before(frame, event, fold.state.ranks.get(frame.rank))
        if missing:
            self.say(FramesMissing(count=missing, of_rank=frame.rank), now)
        self._heard(now)
        if event is None:
            # It came, so it is no gap; a newer version's kinds are passed over.
            fold.note_sequence(frame)
            raise unusable or CodecError("malformed", "no event")
        self._attempt = max(self._attempt, frame.attempt)
        self.record.append(bytes(data), frame, event)
        return frame.rank

    def _heard(self, now: float) -> None:
        if self.record.fold.state.silent_s is not None:
            self.say(JobRecovered(silent_s=max(0.0, now - self._heard_at)), now)
        self._heard_at = now

    # --- from watchers --------------------------------------------------------------------

    def on_watch_message(
        self, identity: bytes, parts: Sequence[bytes], now: float
    ) -> list[Outgoing]:
        """Answer one query; a command goes out to the agents as well."""
        try:
            query = query_decoder.decode(wire.open_message(list(parts), wire.QUERY))
        except CodecError as error:
            self.record.fold.reject(error.category)
            return []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.record.fold.reject("malformed")
            return []
        outgoing: list[Outgoing] = []
        reply: AnyReply
        try:
            if isinstance(query, Send):
                reply, requests = self._take_command(query, now)
                outgoing = self._to_agent(requests)
            else:
                self._commit_for(query, now)
                reply = answer(query, self.record)
        except Exception as error:
            self.record.fold.reject("failed")
            self.trouble(error)
            reply = ErrorReply(id=query.id, reason=clean_text(f"{type(error).__name__}: {error}"))
        encoded = _encoder.encode(reply)
        outgoing.append(Outgoing(False, [identity, *wire.message(wire.REPLY, encoded)]))
        return outgoing

    def _commit_for(self, query: Any, now: float) -> None:
        """Commit before handing out what is new: else a successor would not know of it."""
        if isinstance(query, Changes):
            if query.after + query.limit <= self.record.committed:
                return
            if 0 <= now - self.record.committed_at < COMMIT_GAP_S:
                return
        self.record.commit(now)

    def _take_command(self, query: Send, now: float) -> tuple[AnyReply, list[list[bytes]]]:
        reason = "the job has ended" if self.job_is_over() else None
        reply, event = self.desk.take(query, reason)
        if event is None:
            return reply, []
        self.say(event, now)
        return reply, self.desk.forward(event.id)

    @staticmethod
    def _to_agent(messages: list[list[bytes]]) -> list[Outgoing]:
        return [Outgoing(True, parts) for parts in messages]

    # --- time -----------------------------------------------------------------------------

    def tick(self, now: float) -> list[Outgoing]:
        """Commit when due; notice silence. Called a few times a second, after the sockets."""
        if self._ticked_at is None or abs(now - self._ticked_at) > CLOCK_JUMP_S:
            self._heard_at = now
        self._ticked_at = now
        self._look_for_stall(now)
        self.record.commit_if_due(now)
        return []

    def _look_for_stall(self, now: float) -> None:
        state = self.record.fold.state
        working = any(r.bound_at is not None and not r.exited for r in state.ranks.values())
        if not working or state.silent_s is not None or self.job_is_over():
            return
        silent = now - self._heard_at
        step_s = recent_step_s(state.recent) or 0.0
        if silent > max(self.stall_after_s, STALL_STEPS * step_s):
            lead = state.counts.get(0)
            steps = None if lead is None else lead.steps
            self.say(JobStalled(silent_s=silent, last_step=steps), now)


def _event_of(frame: Frame) -> tuple[Event | None, CodecError | None]:
    """The event in a frame, or why it cannot be used."""
    try:
        event = codec.decode_event(frame.event)
        ingest.check_event(event)
    except CodecError as error:
        return None, error
    return event, None
