"""What guides the `histogram` scaler: the largest gradients lately, and what overflows taught.

The scale that just fits follows from the largest unscaled gradient (one shot), so an overflow is
foreseen rather than suffered. Gradients of activations are not seen and overflow first: an
overflow therefore stays authoritative and teaches a limit of its own.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

LARGEST_HALF: Final = 65504.0
# Room between the largest gradient of late and the largest number of fp16.
HEADROOM: Final = 4.0
# Windows whose largest gradient counts.
HORIZON: Final = 100
# Gradients of activations exceed those of weights, but hardly by more than this.
PLAUSIBLE_OCTAVES: Final = 10


class Guide:
    """Says where the scale should stand. Scales it returns are powers of two."""

    def __init__(self) -> None:
        self._peaks: deque[float] = deque(maxlen=HORIZON)
        self._limit = math.inf
        # The overflows of the present row, and the lowest scale that they led to.
        self._streak = 0
        self._lowest = math.inf
        # Windows for which a row of overflows that no gradient explained is remembered.
        self._doubt = 0

    def after_overflow(self, lowered: float) -> float:
        """An overflow came and the scale went down to `lowered`: what it should be instead.

        The first of a row takes the step that every scaler takes; the next ones 2, 4, 8 octaves,
        since the first clean window shows how far up it may go again.
        """
        self._lowest = min(self._lowest, lowered)
        further = 2 ** min(self._streak, 5) - 1
        self._streak += 1
        return math.ldexp(lowered, -further)

    def after_clean(self, peak: float | None) -> float | None:
        """A clean window came; None: nothing is known that the scale could follow."""
        if peak is not None and 0 < peak < math.inf:
            self._peaks.append(peak)
        if not self._peaks:
            return None
        aim = best_scale(max(self._peaks))
        self._doubt = max(0, self._doubt - 1)
        if self._streak:
            self._learn(aim)
        return min(aim, self._limit)

    def _learn(self, aim: float) -> None:
        """A row of overflows is over: take its lesson, or wait whether it comes again.

        Overflows far below what the gradients allow are rather a bad batch or a NaN of the
        forward; remembering those would leave the scale down there for thousands of windows.
        """
        lowest, self._lowest, self._streak = self._lowest, math.inf, 0
        if math.ldexp(lowest, PLAUSIBLE_OCTAVES) < aim and not self._doubt:
            self._doubt = HORIZON
        else:
            self._limit = min(self._limit, lowest)

    def relax(self, factor: float) -> None:
        """Enough clean windows: what an overflow taught may have become untrue."""
        self._limit *= factor

    def start_over(self, limit: float) -> None:
        """Somebody set the scale by hand: what was learned does not apply."""
        self._limit, self._lowest = limit, math.inf
        self._streak = self._doubt = 0
        self._peaks.clear()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next answers."""
        return {
            "peaks": list(self._peaks),
            "limit": self._limit,
            "streak": self._streak,
            "lowest": self._lowest,
            "doubt": self._doubt,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._peaks = deque(map(float, state["peaks"]), maxlen=HORIZON)
        self._limit, self._lowest = float(state["limit"]), float(state["lowest"])
        self._streak, self._doubt = int(state["streak"]), int(state["doubt"])


def best_scale(peak: float, headroom: float = HEADROOM) -> float:
    """The largest power of two that leaves `headroom` above a gradient of magnitude `peak`."""
    exponent = math.floor(math.log2(LARGEST_HALF / headroom) - math.log2(peak))
    return math.ldexp(1.0, max(-126, min(126, exponent)))
