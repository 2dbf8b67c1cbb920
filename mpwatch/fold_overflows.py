"""How overflows, diagnoses and sampled distributions fold.

Pure, part of `mpwatch.fold`. A step that overflowed and what was found of it are two events that
may come in either order: one entry. Text of the script (names) is cleaned on the way in.
"""

from typing import Any, Final

import msgspec

from mpwatch import events
from mpwatch.codec import Frame
from mpwatch.fold_state import FoldState, append
from mpwatch.store import DiagnosisSeen, OverflowSeen
from mpwatch.vocabulary import clean_text

MAX_OVERFLOWS: Final = 200
MAX_DIAGNOSES: Final = 100
# Entries that are looked through for the other half of an overflow.
NEAR: Final = 32
LEAD_RANK: Final = 0


def happened(state: FoldState, frame: Frame, event: events.StepFinished) -> None:
    """A step overflowed."""
    _put(
        state,
        frame,
        event.step,
        event.optimizer,
        loss_scale_before=event.loss_scale_before,
        loss_scale_after=event.loss_scale_after,
    )


def located(state: FoldState, frame: Frame, event: events.OverflowLocated) -> None:
    """It was found where, and why."""
    _put(
        state,
        frame,
        event.step,
        event.optimizer,
        micro_batch=event.micro_batch,
        micro_batch_reason=clean_text(event.micro_batch_reason, 300),
        parameter=_name(event.parameter),
        module=_name(event.module),
        kind=_name(event.nonfinite),
        where=clean_text(event.where, 20),
        loss_scale=event.loss_scale,
        headroom_octaves=event.headroom_octaves,
        parameters_hit=event.parameters_hit,
        order=clean_text(event.order, 20),
        verdict=clean_text(event.verdict, 40),
        evidence=clean_text(event.evidence, 1000),
        dumped=clean_text(event.dumped, 300),
    )


def _name(text: str | None) -> str | None:
    return None if text is None else clean_text(text, 300)


def _put(state: FoldState, frame: Frame, step: int, optimizer: int, **fields: Any) -> None:
    place = (step, frame.attempt, frame.rank, optimizer)
    entries = state.overflows
    for index in range(len(entries) - 1, max(-1, len(entries) - 1 - NEAR), -1):
        entry = entries[index]
        if (entry.step, entry.attempt, entry.rank, entry.optimizer) == place:
            entries[index] = msgspec.structs.replace(entry, **fields)
            return
    scales = {"loss_scale_before": None, "loss_scale_after": None}
    seen = OverflowSeen(
        step=step,
        attempt=frame.attempt,
        rank=frame.rank,
        optimizer=optimizer,
        **{**scales, **fields},
    )
    entries.append(seen)
    if len(entries) > MAX_OVERFLOWS:
        # The first one stays: it is usually the cause of those that follow.
        del entries[1]


def diagnosed(state: FoldState, frame: Frame, event: events.DiagnosisRaised) -> None:
    """Something is wrong; told again, the newer replaces the older in its place."""
    seen = DiagnosisSeen(
        name=clean_text(event.name, 100),
        severity=clean_text(event.severity, 20),
        step=event.step,
        evidence=clean_text(event.evidence, 1000),
        advice=clean_text(event.advice, 1000),
        rank=frame.rank,
    )
    for index, earlier in enumerate(state.diagnoses):
        if (earlier.name, earlier.rank) == (seen.name, seen.rank):
            state.diagnoses[index] = seen
            return
    append(state.diagnoses, seen, MAX_DIAGNOSES)


def gradients_sampled(state: FoldState, frame: Frame, event: events.GradientsSampled) -> None:
    """The newest distribution of gradients."""
    if frame.rank != LEAD_RANK:
        return
    layers = tuple(
        msgspec.structs.replace(layer, name=clean_text(layer.name, 200)) for layer in event.layers
    )
    state.gradients = msgspec.structs.replace(
        event,
        layers=layers,
        stored_as=clean_text(event.stored_as, 100),
        note=clean_text(event.note, 500),
    )


def activations_sampled(state: FoldState, frame: Frame, event: events.ActivationsSampled) -> None:
    """The newest headroom of activations."""
    if frame.rank != LEAD_RANK:
        return
    modules = tuple(
        msgspec.structs.replace(module, name=clean_text(module.name, 200))
        for module in event.modules
    )
    state.activations = msgspec.structs.replace(event, modules=modules)
