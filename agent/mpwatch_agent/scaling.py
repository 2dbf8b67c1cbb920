"""The loss scaler: one class, told after each window whether its gradients overflowed.

Owns the scale and every counter behind it. Knows no tensor, no optimizer and no loop: those who
use it (`precision` for scripts without a scaler, `replaced_scaler` for those with one) multiply the
loss, divide the gradients and skip the step.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mpwatch_agent.scaler_guide import Guide
from mpwatch_agent.scaler_presets import HIGHEST, LOWEST, Policy

# Below this the person hears of it, whatever the floor: a scale of 1 scales nothing.
LOW_SCALE: Final = 1.0
# With a floor of its own, this many times the floor is soon enough.
LOW_ABOVE_FLOOR: Final = 16.0


class Update(NamedTuple):
    """What one window did to the scale.

    `change` is "grew", "fell", "held" (an overflow that hysteresis took) or "". `reached` is
    "low", "floor" or "ceiling" where the scale has just come there; `pressed` is "floor" or
    "ceiling" where it stood there already and would have gone further.
    """

    before: float
    after: float
    change: str = ""
    reached: str = ""
    pressed: str = ""


class LossScaler:
    """A scale that falls when gradients overflow and grows after enough clean windows."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.scale = self._within(_single(policy.init_scale))
        # Clean windows since the last overflow or growth, and the same in the interval's unit.
        self.clean_windows = 0
        self.progress = 0
        self.patience = policy.hysteresis
        self.clean_total = 0
        self.overflow_total = 0
        self.growths = 0
        self.backoffs = 0
        self._told = ""
        self.guide = Guide() if policy.guided else None

    def update(
        self,
        overflowed: bool,
        *,
        micro_batches: int = 1,
        samples: int | None = None,
        peak: float | None = None,
    ) -> Update:
        """A window is over.

        Args:
            overflowed: one of its gradients was not finite; its step is skipped.
            micro_batches: how many it had, over all ranks.
            samples: how many samples it had; None counts one per window.
            peak: the largest magnitude among its unscaled gradients, for guided policies.
        """
        before = self.scale
        change = self._overflow() if overflowed else self._clean(micro_batches, samples)
        if self.guide is not None:
            self._follow(overflowed, peak, change)
        pressed = self._pressed(change, moved=self.scale != before)
        held = "held" if change == "held" else ""
        moved = "grew" if self.scale > before else "fell" if self.scale < before else held
        return Update(before, self.scale, moved, self._reached(before), pressed)

    # --- rules ------------------------------------------------------------------------------

    def _overflow(self) -> str:
        policy = self.policy
        self.overflow_total += 1
        self.clean_windows = self.progress = 0
        if self.patience > 1:
            self.patience -= 1
            return "held"
        wanted = _single(self.scale * policy.backoff_factor)
        floor = LOWEST if policy.floor is None else policy.floor
        if policy.keeps_off_floor and wanted <= floor:
            return "floor"
        lowered = max(wanted, _single(floor))
        if lowered >= self.scale:
            return "floor"
        self.scale = lowered
        self.backoffs += 1
        return "fell"

    def _clean(self, micro_batches: int, samples: int | None) -> str:
        policy = self.policy
        units = {"micro_batches": micro_batches, "samples": samples or 1}
        unit = max(1, units.get(policy.interval_unit, 1))
        self.clean_total += 1
        self.clean_windows += 1
        self.progress += unit
        if policy.consecutive:
            self.patience = policy.hysteresis
        # One more window like this would go beyond the interval: it is over.
        if self.progress + unit <= policy.growth_interval:
            return ""
        self.clean_windows = self.progress = 0
        self.patience = policy.hysteresis
        return self._grow()

    def _grow(self) -> str:
        wanted = _single(self.scale * self.policy.growth_factor)
        if self.guide is not None:
            # Its scale follows the gradients; what relaxes is the limit that overflows taught.
            self.guide.relax(self.policy.growth_factor)
            return ""
        if not math.isfinite(wanted):
            return ""
        raised = self._within(wanted)
        if raised <= self.scale:
            return "ceiling" if wanted > self.scale else ""
        self.scale = raised
        self.growths += 1
        return "grew"

    def _follow(self, overflowed: bool, peak: float | None, change: str) -> None:
        """Let a guided scale follow what the gradients need."""
        assert self.guide is not None
        if overflowed:
            if change == "fell":
                self.scale = self._within(self.guide.after_overflow(self.scale))
            return
        aim = self.guide.after_clean(peak)
        if aim is None:
            return
        aim = self._within(_single(aim))
        self.growths += aim > self.scale
        self.backoffs += aim < self.scale
        self.scale = aim

    def _within(self, scale: float) -> float:
        policy = self.policy
        low = LOWEST if policy.floor is None else max(LOWEST, _single(policy.floor))
        high = math.inf if policy.ceiling is None else policy.ceiling
        return max(low, min(scale, high))

    # --- limits -----------------------------------------------------------------------------

    def _low(self) -> float:
        floor = self.policy.floor
        return LOW_SCALE if floor is None else max(LOW_SCALE, floor * LOW_ABOVE_FLOOR)

    def _reached(self, before: float) -> str:
        policy, after = self.policy, self.scale
        floor = LOWEST if policy.floor is None else _single(policy.floor)
        if after < before and after <= floor:
            return "floor"
        if after < before and after < self._low() <= before:
            return "low"
        if after > before and policy.ceiling is not None and after >= policy.ceiling:
            return "ceiling"
        return ""

    def _pressed(self, change: str, *, moved: bool) -> str:
        """Where the scale wanted past a limit; said once for each stay there."""
        if moved:
            self._told = ""
        if change not in ("floor", "ceiling") or self._told == change:
            return ""
        self._told = change
        return change

    # --- changes from outside -----------------------------------------------------------------

    def adopt(self, scale: float, clean_windows: int = 0, *, hold: bool = False) -> None:
        """Go on from a scale that somebody else has set.

        `hold`: a guided scaler does not rise above it until the growth interval is over.

        Raises:
            ValueError: not a scale that gradients can be divided by.
        """
        if not LOWEST <= scale <= HIGHEST:
            raise ValueError(f"scale {scale:g} is not within 2^-126 and 2^126")
        self.scale = self._within(_single(scale))
        self.clean_windows = self.progress = clean_windows
        self.patience = self.policy.hysteresis
        if self.guide is not None:
            self.guide.start_over(self.scale if hold else math.inf)

    def follow_policy(self, policy: Policy) -> None:
        """Go on from the present scale by other rules."""
        self.policy = policy
        self.guide = Guide() if policy.guided else None
        self.adopt(min(max(self.scale, LOWEST), HIGHEST))

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what the scale will be, and every counter."""
        return {
            "policy": self.policy.name,
            "scale": self.scale,
            "clean_windows": self.clean_windows,
            "progress": self.progress,
            "patience": self.patience,
            "clean_total": self.clean_total,
            "overflow_total": self.overflow_total,
            "growths": self.growths,
            "backoffs": self.backoffs,
            "told": self._told,
            "guide": None if self.guide is None else self.guide.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError, KeyError: the state belongs to another policy, or is none.
        """
        if state["policy"] != self.policy.name:
            raise ValueError(f"state of scaler {state['policy']!r}, not {self.policy.name!r}")
        self.scale = float(state["scale"])
        for name in ("clean_windows", "progress", "patience", "clean_total", "overflow_total"):
            setattr(self, name, int(state[name]))
        self.growths, self.backoffs = int(state["growths"]), int(state["backoffs"])
        self._told = str(state["told"])
        if self.guide is not None:
            self.guide.load_state_dict(state["guide"])


def _single(value: float) -> float:
    """`value` as a 32-bit float has it: what a scale tensor on a device would hold."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf
    return rounded
