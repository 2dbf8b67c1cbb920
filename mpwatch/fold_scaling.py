"""How precision and loss scaling fold: what was asked for, what became of it, which limits came.

Functions over the fold's state, called by `mpwatch.fold`. Follows rank 0; text is cleaned here.
"""

from typing import Final

import msgspec

from mpwatch import events
from mpwatch.codec import Frame
from mpwatch.fold_state import FoldState
from mpwatch.fold_steps import LEAD_RANK
from mpwatch.store import PrecisionSeen, ScaleLimitSeen, ScalingSeen
from mpwatch.vocabulary import clean_text

MAX_NOTES: Final = 10
MAX_LIMITS: Final = 20


def precision_applied(state: FoldState, frame: Frame, event: events.PrecisionApplied) -> None:
    """The loop runs in the precision that was asked for."""
    if frame.rank == LEAD_RANK:
        state.precision = PrecisionSeen(
            mode=clean_text(event.mode, 20),
            state="applied",
            dtype=clean_text(event.dtype, 20) or None,
            scaler=None if event.scaler is None else clean_text(event.scaler, 40),
            notes=_notes(event.notes),
        )


def precision_refused(state: FoldState, frame: Frame, event: events.PrecisionRefused) -> None:
    """It does not, or not any more."""
    if frame.rank == LEAD_RANK:
        before = state.precision
        state.precision = PrecisionSeen(
            mode=clean_text(event.mode, 20),
            state="given_back" if event.was_on else "refused",
            dtype=None if before is None else before.dtype,
            reason=clean_text(event.reason, 300),
            after_step=event.after_step,
            notes=() if before is None else before.notes,
        )


def scaler_replaced(state: FoldState, frame: Frame, event: events.ScalerReplaced) -> None:
    """A scaler follows another policy."""
    if frame.rank == LEAD_RANK:
        state.scaling = _changed(
            state,
            policy=clean_text(event.policy, 40),
            replaced=clean_text(event.replaced, 100),
            refused="",
            knobs=event.knobs,
            expected_skip_rate=event.expected_skip_rate,
            notes=_notes(event.notes),
        )


def scaler_refused(state: FoldState, frame: Frame, event: events.ScalerRefused) -> None:
    """There is nothing that could follow it."""
    if frame.rank == LEAD_RANK:
        state.scaling = _changed(
            state, policy=clean_text(event.policy, 40), refused=clean_text(event.reason, 300)
        )


def limit_reached(state: FoldState, frame: Frame, event: events.ScaleLimitReached) -> None:
    """The scale is low, or at its floor or ceiling."""
    if frame.rank == LEAD_RANK:
        seen = ScaleLimitSeen(
            limit=clean_text(event.limit, 20),
            scale=event.scale,
            step=event.step,
            action=clean_text(event.action, 20),
        )
        before = () if state.scaling is None else state.scaling.limits
        state.scaling = _changed(state, limits=(*before, seen)[-MAX_LIMITS:])


def nonfinite_found(state: FoldState, frame: Frame, event: events.NonfiniteFound) -> None:
    """Gradients were not finite where no scaler looks."""
    if frame.rank == LEAD_RANK:
        count = 0 if state.scaling is None else state.scaling.nonfinite_steps
        state.scaling = _changed(state, nonfinite_steps=count + 1)


def _changed(state: FoldState, **fields: object) -> ScalingSeen:
    return msgspec.structs.replace(state.scaling or ScalingSeen(), **fields)


def _notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(clean_text(note, 300) for note in notes[:MAX_NOTES])
