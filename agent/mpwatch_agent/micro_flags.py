"""Whether gradients were finite after each backward of a window: says which micro-batch it was.

A gradient that is not finite stays so until the window ends, so the first flag that is not finite
names the micro-batch. Flags stay where the gradients are and are read only after an overflow.
Nothing at one micro-batch per window. Limits itself by measuring what it costs.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpwatch_agent.finiteness import Watched, values_of, watched_sum, whole_sum
from mpwatch_agent.shield import Gate
from mpwatch_agent.tracks import MicroBatch, OptimizerTrack

MODES = ("auto", "full", "off")
# The most that flags may cost, as a share of the time that micro-batches take.
MOST = 0.01
# After an overflow everything is watched for so many steps.
ARMED_STEPS = 200
# Windows before the cost is held against the limit: the first ones are no measure.
GRACE_WINDOWS = 20
MAX_STRIDE = 1024
_clock = time.perf_counter


# What is kept of one micro-batch: finite if the gradients are. Empty where there were none.
Flag = torch.Tensor | tuple[torch.Tensor, ...]


class Answer(NamedTuple):
    """The micro-batch, counted from 0, or why it cannot be told."""

    micro_batch: int | None
    reason: str = ""


class MicroFlags:
    """Flags of all optimizers' open windows."""

    def __init__(self, gate: Gate, mode: str = "auto") -> None:
        self._gate = gate
        self.mode = mode
        self.armed_until = 0
        # One window in so many is watched: more than 1 where all of them would cost too much.
        self.stride = 1
        self._watched: dict[int, Watched] = {}
        self._windows = 0
        self._window_s = 0.0
        self._micro_s = 0.0
        self._spent_s = 0.0
        self._last_end: float | None = None

    def everything(self, step: int) -> bool:
        """Whether every element is watched at `step`."""
        return self.mode == "full" or (self.mode == "auto" and step <= self.armed_until)

    def arm(self, step: int, steps: int = ARMED_STEPS) -> None:
        """An overflow at `step`, or somebody asks: watch everything for a while."""
        self.armed_until = max(self.armed_until, step + steps)

    # --- while a window runs ----------------------------------------------------------------

    def window_is_watched(self, step: int) -> bool:
        """Whether micro-batches of the window that begins now, of `step`, are looked at."""
        return self.mode != "off" and (
            self._windows % self.stride == 0 or step <= self.armed_until or self.mode == "full"
        )

    def backward_ended(
        self, tracks: Sequence[OptimizerTrack], micro: MicroBatch, step: int
    ) -> None:
        """A backward of `micro` has added to the gradients of (some of) `tracks`."""
        if len(tracks) == 1 and tracks[0].usual_window == 1:
            return
        if self._windows % self.stride and not self.everything(step):
            return
        now = _clock()
        if self._last_end is not None:
            self._micro_s += now - self._last_end
        for track in tracks:
            if track.last_micro is micro and self._is_watched(track):
                self._flag(track, micro, step)
        self._last_end = _clock()

    def _is_watched(self, track: OptimizerTrack) -> bool:
        if self.mode == "off" or track.usual_window == 1:
            return False
        # After the last one of a window, what is left to see is there when the window is over.
        return not track.usual_window or len(track.window) != track.usual_window

    def _flag(self, track: OptimizerTrack, micro: MicroBatch, step: int) -> None:
        start = _clock()
        micro.flags[track.serial] = self._sum(track, step)
        spent = _clock() - start
        self._window_s += spent
        if not self.everything(step):
            self._spent_s += spent

    def _sum(self, track: OptimizerTrack, step: int) -> Flag | None:
        optimizer = track.ref()
        if optimizer is None:
            return None
        watched = self._watched.get(track.serial)
        if watched is None or not watched.is_of(optimizer):
            watched = self._watched[track.serial] = Watched(optimizer)
        if watched.plain:
            everything = self.everything(step)
            return watched.look_at_all(optimizer) if everything else watched.look(optimizer)
        values = watched_values(optimizer)
        return whole_sum(values) if self.everything(step) else watched_sum(values)

    def window_over(self, micro_batches: int) -> float | None:
        """The leader's window ended: is what flags cost within the limit?

        Returns:
            What watching it took, in microseconds per micro-batch; None where it was not.
        """
        spent, self._window_s = self._window_s, 0.0
        self._windows += 1
        self._last_end = None
        if self._windows % GRACE_WINDOWS == 0:
            self._limit()
        return spent / micro_batches * 1e6 if spent and micro_batches > 1 else None

    def _limit(self) -> None:
        if not self._micro_s:
            return
        # Both were measured in watched windows only.
        share = self._spent_s / self._micro_s / self.stride
        if share > MOST:
            self.stride = min(MAX_STRIDE, self.stride * 2)
        elif share < MOST / 4 and self.stride > 1:
            self.stride //= 2
        self._spent_s = self._micro_s = 0.0

    # --- after an overflow ------------------------------------------------------------------

    def first(self, track: OptimizerTrack, window: Sequence[MicroBatch], step: int) -> Answer:
        """Which micro-batch of `window` brought what is not finite. Reads the device."""
        if len(window) == 1:
            return Answer(0)
        if self.mode == "off":
            return Answer(None, "micro-batches are not watched (--locate off)")
        if len(window) == 0:
            return Answer(None, "no backward of this window was seen")
        flags = [micro.flags.get(track.serial) for micro in window]
        if all(flag is None for flag in flags[:-1]):
            return Answer(None, self._why_unwatched(track, window))
        if flags[-1] is None:
            flags[-1] = self._sum(track, step)
        finite = [None if flag is None else _is_finite(flag) for flag in flags]
        if False not in finite:
            return Answer(
                None, "what overflowed is not among the watched elements; --locate full watches all"
            )
        first = finite.index(False)
        if first and finite[first - 1] is None:
            return Answer(None, "the micro-batch before it was not watched: the window was longer")
        return Answer(first)

    def _why_unwatched(self, track: OptimizerTrack, window: Sequence[MicroBatch]) -> str:
        if track.usual_window == 1 or len(window) != track.usual_window:
            return "the window was longer than those before it"
        return f"one window in {self.stride} is watched, to stay within 1 % of a micro-batch"


def _is_finite(flag: Flag) -> bool:
    """Reads the device."""
    if isinstance(flag, tuple):
        return not flag or bool(torch.isfinite(torch.stack(flag)).all())
    return bool(torch.isfinite(flag))


def watched_values(optimizer: Any) -> list[torch.Tensor]:
    """The readable gradients of an optimizer as they are now."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            values = None if gradient is None else values_of(gradient)
            if values is not None:
                found.append(values)
    return found
