"""The pure fold: events in the order of the record become the state that watchers see.

No clock, file, socket or thread. Live hub, restarted hub, replay and salvage run the same fold, so
they agree by construction. Bounded whatever the length of the run; text from the script is
cleaned on the way in; a number that makes no sense is left out rather than added.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from mpwatch import (
    events,
    fold_commands,
    fold_jobs,
    fold_overflows,
    fold_ranks,
    fold_scaling,
    fold_steps,
)
from mpwatch.codec import HUB_RANK, Frame
from mpwatch.fold_state import FoldState, rank_of
from mpwatch.fold_view import view_of
from mpwatch.store import RunView

_Handler = Callable[[FoldState, Frame, Any], None]


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
            handler(state, frame, event)

    def note_sequence(self, frame: Frame) -> None:
        """Remember the newest frame of a rank, also where its event could not be used."""
        rank = rank_of(self.state, frame)
        rank.sequence = frame.sequence
        rank.time = frame.time
        self.state.silent_s = None


# No Heartbeat: it is a sign of life only (its frame counts), and may arrive after the pause's end.
_HANDLERS: Final[dict[type[events.Event], _Handler]] = {
    events.AgentBound: fold_ranks.agent_bound,
    events.LoopFound: fold_ranks.loop_found,
    events.StepFinished: fold_steps.step_finished,
    events.WindowDiscarded: fold_steps.window_discarded,
    events.AccumulationChanged: fold_steps.accumulation_changed,
    events.OverflowLocated: fold_overflows.located,
    events.DiagnosisRaised: fold_overflows.diagnosed,
    events.GradientsSampled: fold_overflows.gradients_sampled,
    events.ActivationsSampled: fold_overflows.activations_sampled,
    events.HookDisabled: fold_ranks.hook_disabled,
    events.EventsDropped: fold_ranks.events_dropped,
    events.TrainingPaused: fold_ranks.paused,
    events.TrainingUnpaused: fold_ranks.unpaused,
    events.PrecisionApplied: fold_scaling.precision_applied,
    events.PrecisionRefused: fold_scaling.precision_refused,
    events.ScalerReplaced: fold_scaling.scaler_replaced,
    events.ScalerRefused: fold_scaling.scaler_refused,
    events.ScaleLimitReached: fold_scaling.limit_reached,
    events.NonfiniteFound: fold_scaling.nonfinite_found,
    events.FaultInjected: fold_ranks.fault_injected,
    events.AgentStopping: fold_ranks.agent_stopping,
    events.AgentExited: fold_ranks.agent_exited,
    events.CommandRequested: fold_commands.requested,
    events.CommandApplied: fold_commands.applied,
    events.CommandRefused: fold_commands.refused,
    events.HubStarted: fold_jobs.hub_started,
    events.JobStarted: fold_jobs.job_started,
    events.JobExited: fold_jobs.job_exited,
    events.JobStalled: fold_jobs.job_stalled,
    events.JobRecovered: fold_jobs.job_recovered,
    events.SystemSampled: fold_jobs.system_sampled,
    events.FramesMissing: fold_jobs.frames_missing,
    events.OutputLine: fold_jobs.output_line,
}

_state_encoder: Final = msgspec.msgpack.Encoder()
_state_decoder: Final = msgspec.msgpack.Decoder(FoldState)
