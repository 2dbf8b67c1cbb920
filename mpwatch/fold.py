"""The pure fold: events in the order of the record become the state that watchers see.

No clock, file, socket or thread. Live hub, restarted hub, replay and salvage run the same fold, so
they agree by construction. Bounded whatever the length of the run; text from the script is
cleaned on the way in; a number that makes no sense is left out rather than added.
"""

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from mpwatch import events, fold_commands
from mpwatch.codec import HUB_RANK, Frame
from mpwatch.fold_state import (
    FoldState,
    MemoryState,
    RankState,
    RecentStep,
    StepCounts,
)
from mpwatch.fold_view import view_of
from mpwatch.quantiles import LogHistogram
from mpwatch.store import AttemptSeen, FaultSeen, HookSeen, OverflowSeen, RunView
from mpwatch.vocabulary import clean_text

RECENT_STEPS: Final = 50
MAX_OVERFLOWS: Final = 500
MAX_ENTRIES: Final = 200
MAX_OPTIMIZERS: Final = 64
MAX_PHASES: Final = 16
MAX_NAMES: Final = 32
LEAD_RANK: Final = 0
LEAD_OPTIMIZER: Final = 0

T = TypeVar("T")


class Fold:
    """Accumulates one run. `state` is what is saved; `view()` what is shown."""

    def __init__(self, state: FoldState | None = None) -> None:
        """Continue from `state`, or start at the beginning of a run."""
        self.state = state if state is not None else FoldState()

    @classmethod
    def load(cls, data: bytes) -> "Fold":
        """Continue from what `dump` gave.

        Raises:
            msgspec.DecodeError: damaged, or of a version that cannot be read.
        """
        return cls(_state_decoder.decode(data))

    def dump(self) -> bytes:
        """The state in a form that a later hub continues from."""
        return _state_encoder.encode(self.state)

    def view(self) -> RunView:
        """An immutable picture of the run after the newest event."""
        return view_of(self.state)

    def reject(self, category: str, count: int = 1) -> None:
        """Count what could not be used; not an event, since anybody may send rubbish."""
        self.state.rejected[category] = self.state.rejected.get(category, 0) + count

    def apply(self, cursor: int, frame: Frame, event: events.Event) -> None:
        """Take in the event that the record numbers `cursor`."""
        state = self.state
        state.cursor = cursor
        if state.first_event_time is None:
            state.first_event_time = frame.time
        state.last_event_time = frame.time
        if frame.rank == HUB_RANK:
            state.hub_sequence = max(state.hub_sequence, frame.sequence)
        else:
            self.note_sequence(frame)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, frame, event)

    def note_sequence(self, frame: Frame) -> None:
        """Remember the newest frame of a rank, also where its event could not be used."""
        rank = self._rank(frame)
        rank.sequence = frame.sequence
        rank.time = frame.time
        self.state.silent_s = None

    def _rank(self, frame: Frame) -> RankState:
        rank = self.state.ranks.get(frame.rank)
        if rank is None or rank.attempt != frame.attempt:
            dropped = 0 if rank is None else rank.dropped_before + rank.dropped
            steps = {} if rank is None else rank.newest_steps
            rank = RankState(frame.rank, frame.attempt, dropped_before=dropped, newest_steps=steps)
            self.state.ranks[frame.rank] = rank
        return rank

    # --- the agent's events ---------------------------------------------------------------

    def _agent_bound(self, frame: Frame, event: events.AgentBound) -> None:
        rank = self._rank(frame)
        if rank.pid is not None:  # another process of the same rank and attempt
            rank.dropped_before, rank.dropped = rank.dropped_before + rank.dropped, 0
            rank.exited, rank.error_type, rank.error = False, None, None
        rank.paused = False
        rank.pid, rank.process_start_time = event.pid, event.process_start_time
        rank.process, rank.bound_at = event.process, frame.time
        rank.host = clean_text(event.host, 200)
        if frame.rank == LEAD_RANK:
            state = self.state
            state.torch_version = clean_text(event.torch_version, 100)
            state.python_version = clean_text(event.python_version, 100)
            state.threads, state.world_size = event.threads, event.world_size
            state.stopping = None
        self._attempt(frame)

    def _loop_found(self, frame: Frame, event: events.LoopFound) -> None:
        if frame.rank != LEAD_RANK:
            return
        state = self.state
        state.described = tuple(
            msgspec.structs.replace(each, name=clean_text(each.name, 200))
            for each in event.optimizers[:MAX_OPTIMIZERS]
        )
        state.roots = tuple(clean_text(root, 200) for root in event.roots[:MAX_NAMES])
        state.notes = tuple(clean_text(note) for note in event.notes[:MAX_NAMES])
        state.device = clean_text(event.device, 100)
        state.scaler = None if event.scaler is None else clean_text(event.scaler, 100)
        state.compiled = event.compiled

    def _step_finished(self, frame: Frame, event: events.StepFinished) -> None:
        rank = self._rank(frame)
        rank.newest_steps[event.optimizer] = event.step
        if event.optimizer == LEAD_OPTIMIZER:
            rank.steps = event.step
        if event.overflow:
            self._overflow(frame, event)
        if frame.rank != LEAD_RANK:
            return
        state = self.state
        counts = state.counts.get(event.optimizer)
        if counts is None:
            counts = state.counts[event.optimizer] = StepCounts()
        counts.add(event.step, event.applied, event.samples or 0, event.tokens or 0)
        if is_duration(event.agent_s) and is_duration(event.sampled_s):
            state.agent_s += event.agent_s
            state.sampled_s += event.sampled_s
        if event.optimizer == LEAD_OPTIMIZER:
            self._leading_step(event)

    def _leading_step(self, event: events.StepFinished) -> None:
        state = self.state
        state.timed_steps += 1
        state.multiplier = event.multiplier
        state.loss = event.loss
        if event.loss_scale_after is not None or event.loss_scale_before is not None:
            state.loss_scale = (
                event.loss_scale_before
                if event.loss_scale_after is None
                else event.loss_scale_after
            )
        if event.grad_norm is not None:
            state.grad_norm = event.grad_norm
        if event.learning_rates:
            state.learning_rates = event.learning_rates[:MAX_NAMES]
        state.samples_known |= event.samples is not None
        state.tokens_known |= event.tokens is not None
        duration = event.duration_s if is_duration(event.duration_s) else None
        state.recent.append(RecentStep(duration, event.samples, event.script_window))
        if len(state.recent) > RECENT_STEPS:
            del state.recent[0]
        phases = state.phases
        for name, seconds in event.phase_s.items():
            histogram = phases.get(name) or _entry(phases, name, LogHistogram)
            if histogram is not None and 0.0 <= seconds < math.inf:
                histogram.add(seconds)
        if event.memory:
            self._memory(event.memory)

    def _memory(self, memory: dict[str, events.PhaseMemory]) -> None:
        for name, last in memory.items():
            last = msgspec.structs.replace(last, kind=clean_text(last.kind, 50))
            peak = max(last.start_bytes, last.end_bytes, last.peak_bytes or 0)
            entry = _entry(self.state.memory, name, lambda: MemoryState(last, 0))  # noqa: B023
            if entry is not None:
                entry.last = last
                entry.peak_bytes = max(entry.peak_bytes, peak)

    def _overflow(self, frame: Frame, event: events.StepFinished) -> None:
        self.state.overflow_count += 1
        seen = OverflowSeen(
            step=event.step,
            attempt=frame.attempt,
            rank=frame.rank,
            optimizer=event.optimizer,
            loss_scale_before=event.loss_scale_before,
            loss_scale_after=event.loss_scale_after,
        )
        _append(self.state.overflows, seen, MAX_OVERFLOWS)

    def _window_discarded(self, frame: Frame, event: events.WindowDiscarded) -> None:
        if frame.rank == LEAD_RANK:
            self.state.discarded_windows += 1

    def _hook_disabled(self, frame: Frame, event: events.HookDisabled) -> None:
        seen = HookSeen(
            hook=clean_text(event.hook, 200), error=clean_text(event.error), rank=frame.rank
        )
        _append(self.state.hooks_disabled, seen, MAX_ENTRIES)

    def _events_dropped(self, frame: Frame, event: events.EventsDropped) -> None:
        rank = self._rank(frame)
        rank.dropped = max(rank.dropped, event.total)

    def _paused(self, frame: Frame, event: events.TrainingPaused) -> None:
        self._rank(frame).paused = True

    def _unpaused(self, frame: Frame, event: events.TrainingUnpaused) -> None:
        self._rank(frame).paused = False

    def _heartbeat(self, frame: Frame, event: events.Heartbeat) -> None:
        self._rank(frame).paused = event.paused

    def _fault_injected(self, frame: Frame, event: events.FaultInjected) -> None:
        seen = FaultSeen(
            fault=clean_text(event.fault, 50),
            step=event.step,
            rank=frame.rank,
            micro_batch=event.micro_batch,
            target=clean_text(event.target, 200),
        )
        _append(self.state.faults, seen, MAX_ENTRIES)

    def _agent_stopping(self, frame: Frame, event: events.AgentStopping) -> None:
        if frame.rank == LEAD_RANK:
            self.state.stopping = clean_text(event.reason, 100)

    def _agent_exited(self, frame: Frame, event: events.AgentExited) -> None:
        rank = self._rank(frame)
        rank.exited, rank.paused = True, False
        rank.error_type = None if event.error_type is None else clean_text(event.error_type, 200)
        rank.error = None if event.error is None else clean_text(event.error)
        fold_commands.settle(self.state)

    # --- the hub's events -----------------------------------------------------------------

    def _attempt(self, frame: Frame) -> int:
        attempts = self.state.attempts
        for index in range(len(attempts) - 1, -1, -1):
            if attempts[index].n == frame.attempt:
                return index
        _append(
            attempts,
            AttemptSeen(
                n=frame.attempt,
                started_at=frame.time,
                pid=None,
                process_start_time=None,
                ended_at=None,
                exit_code=None,
                signal=None,
                cause=None,
            ),
            MAX_ENTRIES,
        )
        return len(attempts) - 1

    def _job_started(self, frame: Frame, event: events.JobStarted) -> None:
        index = self._attempt(frame)
        self.state.attempts[index] = msgspec.structs.replace(
            self.state.attempts[index],
            started_at=frame.time,
            pid=event.pid,
            process_start_time=event.process_start_time,
        )

    def _job_exited(self, frame: Frame, event: events.JobExited) -> None:
        index = self._attempt(frame)
        self.state.attempts[index] = msgspec.structs.replace(
            self.state.attempts[index],
            ended_at=frame.time,
            exit_code=event.exit_code,
            signal=event.signal,
            cause=clean_text(event.cause) or None,
        )
        self.state.silent_s = None
        for rank in self.state.ranks.values():
            if rank.attempt <= frame.attempt:
                rank.exited, rank.paused = True, False
        fold_commands.settle(self.state)

    def _hub_started(self, frame: Frame, event: events.HubStarted) -> None:
        self.state.hubs += 1

    def _stalled(self, frame: Frame, event: events.JobStalled) -> None:
        self.state.silent_s = event.silent_s

    def _recovered(self, frame: Frame, event: events.JobRecovered) -> None:
        self.state.silent_s = None

    def _system_sampled(self, frame: Frame, event: events.SystemSampled) -> None:
        self.state.system = event

    def _frames_missing(self, frame: Frame, event: events.FramesMissing) -> None:
        self.state.missing_frames += event.count


def is_duration(value: float | None) -> bool:
    """Whether `value` can be added to a sum of seconds."""
    return value is not None and 0.0 <= value < math.inf


def _append(entries: list[T], entry: T, limit: int) -> None:
    entries.append(entry)
    if len(entries) > limit:
        del entries[0]


def _entry(entries: dict[str, T], name: str, make: Callable[[], T]) -> T | None:
    """The entry of that name, made where it is new; None where there are too many names."""
    entry = entries.get(name)
    if entry is None and len(entries) < MAX_PHASES and name == clean_text(name, 50):
        entry = entries[name] = make()
    return entry


_HANDLERS: Final[dict[type[events.Event], Callable[[Fold, Frame, Any], None]]] = {
    events.AgentBound: Fold._agent_bound,
    events.LoopFound: Fold._loop_found,
    events.StepFinished: Fold._step_finished,
    events.WindowDiscarded: Fold._window_discarded,
    events.HookDisabled: Fold._hook_disabled,
    events.EventsDropped: Fold._events_dropped,
    events.TrainingPaused: Fold._paused,
    events.TrainingUnpaused: Fold._unpaused,
    events.Heartbeat: Fold._heartbeat,
    events.FaultInjected: Fold._fault_injected,
    events.AgentStopping: Fold._agent_stopping,
    events.AgentExited: Fold._agent_exited,
    events.CommandRequested: lambda fold, _, event: fold_commands.requested(fold.state, event),
    events.CommandApplied: lambda fold, frame, event: fold_commands.applied(
        fold.state, frame.rank, event
    ),
    events.CommandRefused: lambda fold, frame, event: fold_commands.refused(
        fold.state, frame.rank, event
    ),
    events.HubStarted: Fold._hub_started,
    events.JobStarted: Fold._job_started,
    events.JobExited: Fold._job_exited,
    events.JobStalled: Fold._stalled,
    events.JobRecovered: Fold._recovered,
    events.SystemSampled: Fold._system_sampled,
    events.FramesMissing: Fold._frames_missing,
}

_state_encoder: Final = msgspec.msgpack.Encoder()
_state_decoder: Final = msgspec.msgpack.Decoder(FoldState)
