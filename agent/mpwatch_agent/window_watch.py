"""Collects what the rules about windows look at: clearings, clips, targets, paces of schedules.

Observes only; asked at each step of the leading optimizer. While mpwatch itself accumulates, what
it swallows is no doing of the script's, and the rules are not asked.
"""

import weakref
from collections.abc import Callable
from typing import Any

from mpwatch_agent.device import settle
from mpwatch_agent.diagnoses import Diagnosis
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.loop import Loop
from mpwatch_agent.schedules import length_of
from mpwatch_agent.window_rules import (
    ClearedInside,
    ClippedOften,
    PartialWindow,
    SchedulePace,
    SumNotMean,
    UnequalTokens,
    WindowSeen,
)

KEPT_AT_MOST = 64


class WindowWatch:
    """Everything about the leader's windows since its last step; `raise_` takes diagnoses."""

    def __init__(self, loop: Loop, raise_: Callable[[Diagnosis], None]) -> None:
        self._loop = loop
        self._raise = raise_
        self._discarded: list[int] = []
        self._clipped: list[int] = []
        self._told_from: dict[str, int] = {}
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rules = (
            UnequalTokens(), PartialWindow(), ClearedInside(), ClippedOften(), SchedulePace(),
            SumNotMean(),
        )  # fmt: skip

    def scheduler_made(self, scheduler: Any) -> None:
        """A scheduler was made; it is looked at, never hooked."""
        self._schedulers.add(scheduler)

    def discarded(self, optimizer: int, lost: int) -> None:
        """`lost` micro-batches of an optimizer were cleared without a step."""
        if optimizer == 0 and len(self._discarded) < KEPT_AT_MOST:
            self._discarded.append(lost)

    def clip_begins(self) -> None:
        """A clip is about to change gradients."""
        leader = self._loop.tracks.leader or next(iter(self._loop.tracks.live), None)
        if leader is not None and leader.has_open and len(self._clipped) < KEPT_AT_MOST:
            self._clipped.append(len(leader.window))

    def step_over(self, draft: StepDraft) -> None:
        """The leader's window is over."""
        discarded, self._discarded = tuple(self._discarded), []
        clipped, self._clipped = tuple(self._clipped), []
        if draft.multiplier > 1 or (len(draft.window) < 2 and not discarded):
            # Ours, or the common loop that accumulates nothing.
            return
        schedule = self.schedule()
        length = None if schedule is None else length_of(schedule)
        steps = draft.schedule_steps
        if steps is None and schedule is not None:
            steps = int(schedule.last_epoch)
        targets = [settle(micro.targets) for micro in draft.window]
        seen = WindowSeen(
            step=draft.step,
            micro_batches=len(draft.window),
            usual_window=draft.usual_window,
            divisor=draft.divisor,
            discarded=discarded,
            clipped_at=clipped,
            targets=tuple(int(count) for count in targets if count is not None),
            schedule_steps=steps,
            schedule_length=length,
            updates=draft.step - self._loop.steps_before,
        )
        for rule in self._rules:
            found = rule.window(seen)
            # Told again when the run is twice as long.
            if found is not None and draft.step >= self._told_from.get(found.name, 0):
                self._told_from[found.name] = 2 * draft.step
                self._raise(found)

    def schedule(self) -> Any:
        """The scheduler that has stepped most for the leader, or None."""
        leader = self._loop.tracks.leader
        optimizer = None if leader is None else leader.ref()
        mine = [s for s in self._schedulers if getattr(s, "optimizer", None) is optimizer]
        stepped = [s for s in mine if hasattr(s, "last_epoch")]
        return max(stepped, key=lambda s: int(s.last_epoch), default=None)
