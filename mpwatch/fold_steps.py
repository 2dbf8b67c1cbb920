"""How steps fold: counts, rates, phases, memory, overflows of the leading optimizer.

Functions over the fold's state, called by `mpwatch.fold`. Totals follow optimizer 0 of rank 0; a
number that makes no sense is left out rather than added.
"""

import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from mpwatch import events, fold_overflows
from mpwatch.codec import Frame
from mpwatch.fold_state import FoldState, MemoryState, RecentStep, StepCounts, append, rank_of
from mpwatch.quantiles import LogHistogram
from mpwatch.vocabulary import clean_text

RECENT_STEPS: Final = 50
MAX_PHASES: Final = 16
MAX_DECISIONS: Final = 1000
MAX_RATES: Final = 32
# How the agent's time is smoothed: over so many seconds or steps, but for the first ones.
STRETCH_S: Final = 0.5
STRETCH_STEPS: Final = 1000
FIRST_STEPS: Final = 2
LEAD_RANK: Final = 0
LEAD_OPTIMIZER: Final = 0

T = TypeVar("T")


def step_finished(state: FoldState, frame: Frame, event: events.StepFinished) -> None:
    """A window ended at an optimizer's step."""
    rank = rank_of(state, frame)
    rank.newest_steps[event.optimizer] = event.step
    if event.optimizer == LEAD_OPTIMIZER:
        rank.steps = event.step
        # What ended the pause may be among the events that were lost.
        rank.paused = rank.paused and event.step <= rank.paused_at
    if event.overflow:
        _overflow(state, frame, event)
    if frame.rank != LEAD_RANK:
        return
    counts = state.counts.get(event.optimizer)
    if counts is None:
        counts = state.counts[event.optimizer] = StepCounts()
    counts.add(event.step, event.applied, event.samples or 0, event.tokens or 0)
    if is_duration(event.agent_s) and is_duration(event.sampled_s):
        state.agent_s += event.agent_s
        state.sampled_s += event.sampled_s
        state.agent_open_s += event.agent_s
    if event.optimizer == LEAD_OPTIMIZER:
        _leading_step(state, event)


def _leading_step(state: FoldState, event: events.StepFinished) -> None:
    state.timed_steps += 1
    _agent_time(state, event)
    state.multiplier = event.multiplier
    state.loss = event.loss
    if event.loss_scale_after is not None or event.loss_scale_before is not None:
        state.loss_scale = (
            event.loss_scale_before if event.loss_scale_after is None else event.loss_scale_after
        )
    if event.grad_norm is not None and (event.applied or math.isfinite(event.grad_norm)):
        # An overflow's norm says nothing about the steps that follow it.
        state.grad_norm = event.grad_norm
    if event.locate_us is not None and is_duration(event.locate_us):
        state.locate_us = event.locate_us
    if event.learning_rates:
        state.learning_rates = event.learning_rates[:MAX_RATES]
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
        _memory(state, event.memory)


def _agent_time(state: FoldState, event: events.StepFinished) -> None:
    """The agent's time per step, as a mean over a stretch.

    It works through the steps it has noted a few times a second, and all of that falls on one step.
    The first steps, which put hooks on, stand alone.
    """
    state.agent_open_steps += 1
    if event.duration_s is not None and is_duration(event.duration_s):
        state.agent_open_duration_s += event.duration_s
    whole = state.agent_open_duration_s >= STRETCH_S or state.agent_open_steps >= STRETCH_STEPS
    if whole or state.timed_steps <= FIRST_STEPS:
        steps = state.agent_open_steps
        state.agent_times.add(state.agent_open_s / steps, steps)
        state.agent_open_s = state.agent_open_duration_s = 0.0
        state.agent_open_steps = 0


def _memory(state: FoldState, memory: dict[str, events.PhaseMemory]) -> None:
    for name, last in memory.items():
        last = msgspec.structs.replace(last, kind=clean_text(last.kind, 50))
        peak = max(last.start_bytes, last.end_bytes, last.peak_bytes or 0)
        entry = _entry(state.memory, name, MemoryState)
        if entry is not None:
            entry.last = last
            entry.peak_bytes = max(entry.peak_bytes, peak)


def _overflow(state: FoldState, frame: Frame, event: events.StepFinished) -> None:
    state.overflow_count += 1
    fold_overflows.happened(state, frame, event)


def window_discarded(state: FoldState, frame: Frame, event: events.WindowDiscarded) -> None:
    """The script cleared gradients without a step."""
    if frame.rank == LEAD_RANK:
        state.discarded_windows += 1


def accumulation_changed(state: FoldState, frame: Frame, event: events.AccumulationChanged) -> None:
    """Another number of script windows makes one from here on, or accumulation was refused."""
    if frame.rank != LEAD_RANK:
        return
    decision = {
        "step": event.step,
        "action": f"accumulate {event.multiplier}",
        "reason": clean_text(event.reason, 300),
        "inputs": {"multiplier": event.multiplier, "previous": event.previous},
        "outcome": "refused" if event.refused else "applied",
    }
    append(state.decisions, decision, MAX_DECISIONS)
    # It holds from the next window on: who asks now gets what is, not what the last step had.
    state.multiplier = event.multiplier


def is_duration(value: float | None) -> bool:
    """Whether `value` can be added to a sum of seconds."""
    return value is not None and 0.0 <= value < math.inf


def _entry(entries: dict[str, T], name: str, make: Callable[[], T]) -> T | None:
    """The entry of that name, made where it is new; None where there are too many names."""
    entry = entries.get(name)
    if entry is None and len(entries) < MAX_PHASES and name == clean_text(name, 50):
        entry = entries[name] = make()
    return entry
