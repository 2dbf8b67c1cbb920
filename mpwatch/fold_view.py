"""From the fold's state to the picture that watchers get: medians, rates, modes.

Pure, called by `mpwatch.fold` when somebody asks, so its cost follows the watchers and never the
rate of events.
"""

import statistics
from collections import Counter
from typing import Any, Final

from mpwatch.fold_state import FoldState, RecentStep, StepCounts
from mpwatch.quantiles import LogHistogram
from mpwatch.store import (
    CommandSeen,
    OptimizerSeen,
    PhaseBytes,
    PhaseSeconds,
    RankSeen,
    RunView,
)

# What a view takes from the state as it is, and what as a tuple.
_SAME: Final = (
    "cursor", "discarded_windows", "windows_dropped", "multiplier", "loss_scale", "loss",
    "grad_norm", "learning_rates", "precision", "scaling", "overflow_count", "missing_frames",
    "described", "roots", "device", "scaler", "compiled", "notes", "torch_version",
    "python_version", "threads", "world_size", "silent_s",
    "stopping", "system", "first_event_time", "last_event_time", "hubs", "record_dropped",
    "record_error", "locate_us", "gradients", "activations",
)  # fmt: skip
_LISTS: Final = ("decisions", "overflows", "diagnoses", "faults", "hooks_disabled", "attempts")


def view_of(state: FoldState) -> RunView:
    """The immutable view of `state`."""
    lead = state.counts.get(0) or StepCounts()
    window = _script_window(state.recent)
    failed = next((rank for rank in state.ranks.values() if rank.error_type), None)
    same: dict[str, Any] = {name: getattr(state, name) for name in _SAME}
    lists: dict[str, Any] = {name: tuple(getattr(state, name)) for name in _LISTS}
    return RunView(
        **same,
        **lists,
        steps=lead.steps,
        applied=lead.applied,
        skipped=lead.skipped,
        superseded=lead.superseded,
        script_window=window,
        accumulation_steps=None if window is None else window * (state.multiplier or 1),
        samples_per_s=_samples_per_s(state.recent),
        step_s=recent_step_s(state.recent),
        samples=lead.samples if state.samples_known else None,
        tokens=lead.tokens if state.tokens_known else None,
        phase_s={name: _phase(histogram) for name, histogram in state.phases.items()},
        memory_bytes=_memory(state),
        commands=_commands(state),
        dropped_events=sum(r.dropped_before + r.dropped for r in state.ranks.values()),
        agent_us_per_step=_per_step_us(state.agent_s, state),
        agent_us_per_step_median=_typical_us(state),
        agent_sampled_us_per_step=_per_step_us(state.sampled_s, state),
        optimizers=_optimizers(state),
        ranks=_ranks(state),
        paused=any(rank.paused for rank in state.ranks.values()),
        stalled=state.silent_s is not None,
        error_type=None if failed is None else failed.error_type,
        error=None if failed is None else failed.error,
        rejected=dict(state.rejected),
    )


def _script_window(recent: list[RecentStep]) -> int | None:
    """What most recent steps have; of two equally common ones the newer."""
    counted = Counter(step.script_window for step in reversed(recent))
    return max(counted, key=counted.__getitem__, default=None)


def _samples_per_s(recent: list[RecentStep]) -> float | None:
    samples, seconds = 0, 0.0
    for step in recent:
        if step.samples is not None and step.duration_s is not None:
            samples += step.samples
            seconds += step.duration_s
    return samples / seconds if samples and seconds > 0.0 else None


def recent_step_s(recent: list[RecentStep]) -> float | None:
    """The median duration of the recent steps."""
    durations = [step.duration_s for step in recent if step.duration_s is not None]
    return statistics.median(durations) if durations else None


def _phase(histogram: LogHistogram) -> PhaseSeconds:
    return PhaseSeconds(median=histogram.median() or 0.0, total=histogram.total)


def _memory(state: FoldState) -> dict[str, PhaseBytes]:
    return {
        name: PhaseBytes(
            start=memory.last.start_bytes,
            peak=memory.peak_bytes,
            end=memory.last.end_bytes,
            kind=memory.last.kind,
        )
        for name, memory in state.memory.items()
        if memory.last is not None
    }


def _per_step_us(seconds: float, state: FoldState) -> float | None:
    return seconds * 1e6 / state.timed_steps if state.timed_steps else None


def _typical_us(state: FoldState) -> float | None:
    """Of the leading steps: what half of them took at most, as means over half a second."""
    times = state.agent_times
    if state.agent_open_steps:
        times = times.copy()
        times.add(state.agent_open_s / state.agent_open_steps, state.agent_open_steps)
    median = times.median()
    return None if median is None else median * 1e6


def _commands(state: FoldState) -> tuple[CommandSeen, ...]:
    return tuple(
        CommandSeen(
            id=command.id,
            command=command.command,
            args=command.args,
            by=command.by,
            outcome=command.outcome,
            step=command.step,
            reason=command.reason,
        )
        for command in state.commands.values()
    )


def _optimizers(state: FoldState) -> tuple[OptimizerSeen, ...]:
    described = {each.index: each for each in state.described}
    return tuple(
        OptimizerSeen(
            index=index,
            name=described[index].name if index in described else "",
            parameters=described[index].parameters if index in described else None,
            steps=counts.steps,
            applied=counts.applied,
            skipped=counts.skipped,
        )
        for index, counts in sorted(state.counts.items())
    )


def _ranks(state: FoldState) -> tuple[RankSeen, ...]:
    return tuple(
        RankSeen(
            rank=rank.rank,
            attempt=rank.attempt,
            process=rank.process,
            pid=rank.pid,
            process_start_time=rank.process_start_time,
            host=rank.host,
            bound_at=rank.bound_at,
            steps=rank.steps,
            last_event_time=rank.time,
            paused=rank.paused,
            exited=rank.exited,
            error_type=rank.error_type,
            error=rank.error,
            dropped_events=rank.dropped_before + rank.dropped,
        )
        for _, rank in sorted(state.ranks.items())
    )
