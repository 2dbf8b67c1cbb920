"""What is done about gradients that are not finite where no loss scaler looks at them.

Reads the largest magnitude of each window's gradients (a NaN makes it one), changes none.
"""

import math
from typing import TYPE_CHECKING, Any

from mpwatch.events import NonfiniteFound
from mpwatch_agent.gradient_scaling import gradients_of, largest
from mpwatch_agent.steering import Part

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

SAID_AT_MOST = 3


class OnNonfinite(Part):
    """`action` is "warn", "skip" (that step only) or "stop" (skip it and end the script)."""

    order = 1

    def __init__(self, agent: "Agent", action: str) -> None:
        self._agent = agent
        self._loop = agent.loop
        self._action = action
        self._found = 0
        self._on = True

    def gradients_whole(self, optimizer: Any) -> None:
        loop = self._loop
        if not self._on or loop.scaled or loop.steered_scale is not None:
            # A scaler looks, and an overflow is part of its trade.
            return
        peak = largest(gradients_of([optimizer]))
        bad = peak is not None and not math.isfinite(peak)
        loop.looked_at_gradients = True
        loop.nonfinite = bad and self._action == "warn"
        skipping = self._agent.steering.skipping
        skipping.discard(id(optimizer))
        if bad:
            if self._action != "warn":
                skipping.add(id(optimizer))
            self._say(optimizer)

    def _say(self, optimizer: Any) -> None:
        agent, track = self._agent, self._loop.tracks.of(optimizer)
        self._found += 1
        step = track.steps + 1 + (self._loop.steps_before if track.index in (0, None) else 0)
        agent.tell_at_once(
            NonfiniteFound(step=step, action=self._action, optimizer=track.index or 0)
        )
        done = {"warn": "applied all the same", "skip": "skipped", "stop": "skipped, stopping"}
        if self._found <= SAID_AT_MOST or self._action == "stop":
            last = ", further ones are not said here" if self._found == SAID_AT_MOST else ""
            what = f"step {step}: gradients are not finite, {done[self._action]}"
            agent.say(what + (last if self._action != "stop" else ""))
        if self._action == "stop":
            agent.boundary.stop("gradients not finite")

    def abandon(self, reason: str) -> None:
        self._on = False
        self._loop.looked_at_gradients = self._loop.nonfinite = False
