"""Learning-rate schedulers under accumulation: which of them step once per window of the script.

With `--schedule updates` those are swallowed with the step they follow, as in a loop that
accumulates by hand; per-epoch, per-metric and explicitly placed ones always pass. With `samples`
everything passes and the schedule keeps its length in data.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mpwatch_agent.accumulation import Accumulation
from mpwatch_agent.loop import Loop

# What a scheduler calls the number of its own steps after which it has nothing more to do.
_LENGTHS = ("T_max", "total_steps", "total_iters")


class Schedule:
    """What is known of one scheduler: where it last stepped, and whether per window so far."""

    def __init__(self) -> None:
        self.position = 0
        self.per_window = True


class Schedules:
    """Decides for each outermost `step` of a scheduler; `depth` counts those that run."""

    def __init__(
        self, part: Accumulation, loop: Loop, mode: str, notice: Callable[[str, str, str], None]
    ) -> None:
        self.depth = 0
        self._part = part
        self._loop = loop
        self._mode = mode
        self._notice = notice
        self._warned = False
        self._known: weakref.WeakKeyDictionary[Any, Schedule] = weakref.WeakKeyDictionary()

    def swallows(self, scheduler: Any, args: Any, kwargs: Any) -> bool:
        """Whether this `scheduler.step` belongs to a window that is not over."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or _initial(scheduler):
            return False
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return False
        schedule = self._known.get(scheduler)
        if schedule is None:
            schedule = self._known[scheduler] = Schedule()
        track = self._loop.tracks.of(optimizer)
        position = self._part.script_windows.get(track.serial, 0) + track.has_fresh
        moved, schedule.position = position - schedule.position, position
        if moved > 1 or any(value is not None for value in (*args, *kwargs.values())):
            # Windows passed without it, or it is told where it stands: not once per window.
            schedule.per_window = False
        if not schedule.per_window or self._mode == "samples" or self._part.refused is not None:
            return False
        self._warn(scheduler, schedule)
        return self._part.step_swallowed(track)

    def _warn(self, scheduler: Any, schedule: Schedule) -> None:
        """Once for each schedule whose length the script gave in its own windows."""
        k = self._part.k
        if self._warned or k == 1 or schedule.position < 2:
            return
        length = length_of(scheduler)
        if length is None:
            return
        self._warned = True
        name = type(scheduler).__name__
        self._notice(
            "schedule_too_long",
            f"{name} spans {length} steps and steps once per {k} windows of the script: if it was"
            f" sized for {length} windows, the run ends at step {length // k} of {length}",
            "--schedule samples keeps the schedule's length in data;"
            f" or give the scheduler {max(1, length // k)} steps",
        )


def _initial(scheduler: Any) -> bool:
    """Whether the scheduler is being made: its first step sets the initial learning rate."""
    flag = getattr(scheduler, "_is_initial", None)
    # An older torch has no flag; schedulers of schedulers count no steps of their own.
    return bool(flag) if flag is not None else getattr(scheduler, "_step_count", 1) == 0


def length_of(scheduler: Any) -> int | None:
    """After how many of its own steps a schedule has come to its end; None: it never does."""
    if getattr(scheduler, "end_factor", 0) >= getattr(scheduler, "start_factor", 1):
        return None  # a warm-up: nothing ends with it
    for name in _LENGTHS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 1:
            return value
    milestones = getattr(scheduler, "milestones", None)
    if milestones:
        return int(max(milestones))
    inner = getattr(scheduler, "_schedulers", None)
    if not inner:
        return None
    lengths = [length_of(each) for each in inner]
    milestones = getattr(scheduler, "_milestones", None)
    if milestones and lengths[-1] is None:
        return None
    begun = [0, *milestones] if milestones else [0] * len(inner)
    known = [s + n for s, n in zip(begun, lengths, strict=False) if n is not None]
    return max(known, default=None)
