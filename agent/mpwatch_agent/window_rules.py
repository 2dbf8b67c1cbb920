"""What windows of micro-batches say about accumulation that a script does by hand: rules.

Pure and bounded: fed one window at a time, they answer with diagnoses. Each speaks only once a
pattern has come back; a single odd window is none.
"""

from collections import deque
from typing import NamedTuple

from mpwatch_agent.diagnoses import Diagnosis

# Windows that a pattern must show in before it is said.
PATTERN = 3
# Token counts that differ by less weigh alike.
SPREAD = 1.2
# Updates before the pace of a schedule is judged, and how far off its pace is no accident.
PACED = 8
OFF_PACE = 0.15


class WindowSeen(NamedTuple):
    """One finished window of the leading optimizer.

    `discarded` are the micro-batches of each clearing without a step since the step before;
    `clipped_at` how many micro-batches were there at each clip; `targets` the targets that each
    micro-batch's mean is over, where that is known; `schedule_steps` and `schedule_length` the
    furthest scheduler's steps so far and its length in steps.
    """

    step: int
    micro_batches: int
    usual_window: int
    divisor: float | None
    discarded: tuple[int, ...] = ()
    clipped_at: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    schedule_steps: int | None = None
    schedule_length: int | None = None
    updates: int = 0


class UnequalTokens:
    """Each micro-batch's loss is a mean over its own tokens: short ones weigh too much."""

    def __init__(self) -> None:
        self._unequal = 0
        self._range = (0, 0)
        self._worst = 1.0

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        counts = seen.targets
        if len(counts) < 2 or len(counts) != seen.micro_batches or min(counts) < 1:
            return None
        if max(counts) < SPREAD * min(counts):
            return None
        self._unequal += 1
        low, high = self._range
        self._range = (min(low or min(counts), min(counts)), max(high, max(counts)))
        self._worst = max(self._worst, sum(counts) / len(counts) / min(counts))
        if self._unequal < PATTERN:
            return None
        return Diagnosis(
            "micro_batches_weighted_unequally",
            "warning",
            f"micro-batches weighted unequally: token counts {self._range[0]}"
            f" to {self._range[1]} inside one window, each with the same weight in the mean;"
            f" tokens of the shortest count {self._worst:.1f} times what they should",
            "sum the losses and divide by the tokens of the whole window"
            ' (mpwatch_agent: accumulator(..., normalize="tokens"))',
        )


class PartialWindow:
    """The rest of an epoch is cleared without a step."""

    def __init__(self) -> None:
        self._times = self._lost = 0

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        short = [n for n in seen.discarded if 0 < n < seen.usual_window]
        # Cleared once between two steps: cleared more often is another fault.
        if len(short) != 1 or len(seen.discarded) != 1:
            return None
        self._times += 1
        self._lost += short[0]
        if self._times < 2:
            return None
        return Diagnosis(
            "partial_windows_dropped",
            "warning",
            f"windows discarded: {self._lost} micro-batches in {self._times} windows had backward"
            f" but gradients were cleared without a step (windows have {seen.usual_window});"
            f" {short[0]} of them before step {seen.step}",
            "step with the short window at the end of an epoch, divided by what arrived",
        )


class ClearedInside:
    """Gradients are cleared after each micro-batch: one of N reaches the update."""

    def __init__(self) -> None:
        self._times = 0

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        lost = seen.discarded
        same = bool(lost) and all(n == seen.micro_batches for n in lost)
        together = seen.micro_batches * (len(lost) + 1)
        meant = seen.divisor is not None and round(seen.divisor) == together
        if not same or (len(lost) < 2 and not meant):
            self._times = 0
            return None
        self._times += 1
        if self._times < PATTERN:
            return None
        divided = f" and its loss is divided by {together}" if meant else ""
        return Diagnosis(
            "gradients_cleared_inside_window",
            "fault",
            f"only {seen.micro_batches} of {together} micro-batches reaches the update{divided}:"
            " gradients are cleared after backward inside the window",
            "clear gradients once, after the step",
        )


class ClippedOften:
    """Gradients are clipped after each micro-batch instead of once."""

    def __init__(self) -> None:
        self._times = 0

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        places = set(seen.clipped_at)
        self._times = self._times + 1 if len(places) > 1 else 0
        if self._times < PATTERN:
            return None
        return Diagnosis(
            "clipped_inside_window",
            "warning",
            f"gradients are clipped after {len(places)} of {seen.micro_batches} micro-batches per"
            " update; expected once, before the step: late micro-batches weigh more",
            "clip once, when the window is complete",
        )


class SchedulePace:
    """The schedule is stepped per micro-batch, not per update."""

    def __init__(self) -> None:
        self._paces: deque[tuple[int, int]] = deque(maxlen=PACED)

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        if seen.schedule_steps is None:
            return None
        self._paces.append((seen.updates, seen.schedule_steps))
        n = seen.usual_window
        if len(self._paces) < PACED or n < 2:
            return None
        updates = self._paces[-1][0] - self._paces[0][0]
        steps = self._paces[-1][1] - self._paces[0][1]
        if updates < 1 or abs(steps / updates / n - 1) > OFF_PACE:
            return None
        ends = ""
        if seen.schedule_length:
            ends = f"; it ends at update {seen.schedule_length // n} of {seen.schedule_length}"
        return Diagnosis(
            "schedule_stepped_per_micro_batch",
            "warning",
            f"schedule runs {n} times faster than updates: {seen.schedule_steps} schedule steps,"
            f" {seen.updates} optimizer steps{ends}",
            "step the scheduler with the optimizer, or give it the length in micro-batches",
        )


class SumNotMean:
    """Losses of a window are added up undivided: the step grows with the window."""

    def __init__(self) -> None:
        self._times = 0

    def window(self, seen: WindowSeen) -> Diagnosis | None:
        undivided = seen.micro_batches > 1 and seen.divisor is None and len(seen.targets) > 1
        self._times = self._times + 1 if undivided else 0
        if self._times != PATTERN:
            return None
        return Diagnosis(
            "window_is_a_sum",
            "info",
            f"the losses of {seen.micro_batches} micro-batches are added up undivided: with SGD"
            " the step is as many times larger as the window is long",
            "nothing to do if the learning rate was chosen with it; accumulation by mpwatch takes"
            " the mean over its own windows and does not compensate for this sum",
        )
