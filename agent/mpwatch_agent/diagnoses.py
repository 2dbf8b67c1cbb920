"""What a run's steps say about its loss scale and its schedule: rules, each with its evidence.

Pure and bounded: fed step by step, they answer with diagnoses. A few skipped steps while a scale
backs off at the start are normal and none of them speaks up.
"""

import statistics
from collections import deque
from typing import NamedTuple

from mpwatch.vocabulary import scale_words

# Overflows with clean windows between them, before they count as a rhythm.
RHYTHM = 4
# Windows in a row with a loss that was not finite.
BROKEN_FORWARDS = 3
_DOUBLINGS = tuple(2**power for power in range(3, 30))
# Schedule steps beyond updates that do no harm, and applied windows in a row after which a scale
# has come down from its start.
HARMLESS_AHEAD = 3
SETTLED = 3


class Diagnosis(NamedTuple):
    """As the event says it: `severity` is info, warning or fault."""

    name: str
    severity: str
    evidence: str
    advice: str = ""


class StepSeen(NamedTuple):
    """One step of the leading optimizer. `growth_interval` is the scaler's, None without one."""

    step: int
    applied: bool
    overflowed: bool
    bad_loss: bool
    scale_before: float | None
    scale_after: float | None
    growth_interval: int | None
    learning_rates: tuple[float, ...]
    module: str = ""


class SinkingScale:
    """Overflows come faster than the scale can grow back."""

    def __init__(self) -> None:
        self._overflows: deque[tuple[int, float, float]] = deque(maxlen=RHYTHM)

    def step(self, seen: StepSeen) -> Diagnosis | None:
        before, after = seen.scale_before, seen.scale_after
        if seen.growth_interval is None or before is None or after is None:
            return None
        if after > before:
            # It has grown: whatever was counted, the scale does recover.
            self._overflows.clear()
        if not seen.overflowed:
            return None
        if self._overflows and seen.step - self._overflows[-1][0] <= 2:
            # Still backing off from a scale that was too high, or a forward that is broken.
            self._overflows.pop()
        self._overflows.append((seen.step, before, after))
        if len(self._overflows) < RHYTHM:
            return None
        return self._judge(seen.growth_interval)

    def _judge(self, interval: int) -> Diagnosis | None:
        steps = [step for step, _, _ in self._overflows]
        gap = statistics.median(b - a for a, b in zip(steps, list(steps)[1:], strict=False))
        first, last = self._overflows[0][1], self._overflows[-1][2]
        if gap > interval or last >= first:
            return None
        halvings = 0
        while last > 1.0 and halvings < 200 and last / 2.0**halvings > 1.0:
            halvings += 1
        forecast = (
            f"; at this rate it reaches 1 about step {steps[-1] + round(gap * halvings)}"
            if last > 1.0
            else "; it is below 1 already, where small gradients turn to zero"
        )
        return Diagnosis(
            "scale_cannot_recover",
            "warning" if last > 1.0 else "fault",
            f"an overflow about every {gap:g} steps, growth needs {interval} clean steps: the scale"
            f" fell from {scale_words(first)} to {scale_words(last)}{forecast}",
            f"a growth interval near {max(1, round(gap / 2))} steps and a floor under the scale;"
            " and look at what overflows (overflows in show)",
        )


class BrokenForward:
    """Losses that are not finite, window after window: no scale helps."""

    def __init__(self) -> None:
        self._first = 0
        self._row = 0
        self._module = ""
        self._scale: float | None = None
        # A step was taken all the same.
        self._taken = False

    def step(self, seen: StepSeen) -> Diagnosis | None:
        if not seen.bad_loss:
            self._row, self._module = 0, ""
            return None
        if not self._row:
            self._first, self._scale = seen.step, seen.scale_before
            self._taken = False
        self._row += 1
        self._taken = self._taken or seen.applied
        self._module = self._module or seen.module
        if self._row not in (BROKEN_FORWARDS, *_DOUBLINGS):
            return None
        where = f", first in {self._module}" if self._module else ""
        scale = ""
        if self._scale is not None and seen.scale_after is not None:
            fell = f"from {scale_words(self._scale)} to {scale_words(seen.scale_after)}"
            scale = f"; the scale fell {fell} for nothing"
        return Diagnosis(
            "forward_not_finite",
            "fault",
            f"the forward makes values that are not finite, in {self._row} windows in a row since"
            f" step {self._first}{where}{scale}",
            _TAKEN if self._taken else _SKIPPED,
        )


_TAKEN = (
    "steps were taken with them, and the weights with that lost: go back to a checkpoint;"
    " --on-nonfinite skip takes no such step"
)
_SKIPPED = "no loss scale helps: fp32 or bf16 for that module, or a check of its inputs"


class ScheduleAhead:
    """The learning rate moves on although no update was applied.

    A scale that starts too high costs a few steps until it has come down: those are normal, and
    no reason to speak up. They are named beside the others where those are.
    """

    def __init__(self) -> None:
        # Of the step before: learning rates, applied, skipped while the scale came down.
        self._before: tuple[tuple[float, ...], bool, bool] | None = None
        self._starting = True
        self._last_skip: int | None = None
        self._ahead = self._at_start = 0
        self._told = HARMLESS_AHEAD

    def step(self, seen: StepSeen) -> Diagnosis | None:
        coming_down = self._comes_down(seen)
        before, self._before = self._before, (seen.learning_rates, seen.applied, coming_down)
        if before is None or before[1] or before[0] == seen.learning_rates:
            return None
        if before[2]:
            self._at_start += 1
            return None
        self._ahead += 1
        if self._ahead <= self._told:
            return None
        # Told again when it has doubled.
        self._told = self._ahead * 2
        return self._judge()

    def _comes_down(self, seen: StepSeen) -> bool:
        """Whether `seen` was skipped because the scale started too high. Quiet steps are unseen."""
        if self._last_skip is None:
            self._last_skip = seen.step - 1
        if seen.step - self._last_skip - (not seen.applied) >= SETTLED:
            self._starting = False
        if seen.applied:
            return False
        self._last_skip = seen.step
        before, after = seen.scale_before, seen.scale_after
        if before is None or after is None or after < 1.0:
            # Nothing comes down, or it was not the scale.
            self._starting = False
            return False
        return self._starting and after < before

    def _judge(self) -> Diagnosis:
        start = (
            f", with {self._at_start} more at the start, while the scale came down"
            if self._at_start
            else ""
        )
        return Diagnosis(
            "schedule_ahead_of_updates",
            "warning",
            f"the learning rate moved on after {self._ahead} steps that were skipped{start}: the"
            f" schedule is {self._ahead + self._at_start} steps ahead of the updates",
            "step the scheduler only when the scale did not go down in scaler.update()",
        )
