"""Why gradients were not finite: rules over what was seen, each with its evidence in words.

Pure. A verdict is what the evidence speaks for, and says which evidence; `unknown` where nothing
speaks for anything.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpwatch.vocabulary import scale_words
from mpwatch_agent.distribution import FP16

# A scale that this many windows in a row were clean at is not the one to blame.
CLEAN_ENOUGH = 3
# Where the largest finite gradient lies within a factor of 4 of fp16's largest value, and the loss
# within twice a typical one, an ordinary batch can overflow: the scale leaves it no room.
NARROW_OCTAVES, ORDINARY = 2.0, 2.0
# The losses of the last windows against those before them.
RECENT, BEFORE, GROWN = 3, 5, 3.0
_CLEAN = {0: "no window before it was", 1: "only 1 window before it was"}


class Verdict(NamedTuple):
    """One of scale_too_high, bad_batch, forward, diverging, carried_over, unknown."""

    verdict: str
    evidence: str


@dataclass
class Findings:
    """What is known of one overflow. `losses` are the finite means of the windows before it.

    `clean_windows` were applied in a row before it at this scale or a higher one. `largest` is the
    largest finite gradient with the scale in it. `forward` is what a traced forward found.
    """

    scale: float | None = None
    clean_windows: int = 0
    largest: float | None = None
    forward: str | None = None
    forward_where: str = ""
    bad_loss: bool = False
    bad_batch: str = ""
    bad_weights: str = ""
    carried_over: str = ""
    losses: Sequence[float] = field(default_factory=tuple)
    micro_loss: float | None = None


def headroom_octaves(largest: float | None) -> float | None:
    """By how many powers of two `largest` (scaled) lies below the largest value of fp16."""
    if largest is None or not largest > 0.0 or not math.isfinite(largest):
        return None
    return math.log2(FP16.largest / largest)


def judge(found: Findings) -> Verdict:
    """The first rule that the findings meet."""
    if found.carried_over:
        return Verdict("carried_over", found.carried_over)
    if found.bad_loss:
        return _forward(found)
    grown = _grown(found.losses)
    if grown is not None:
        return Verdict("diverging", grown)
    return _backward(found)


def _forward(found: Findings) -> Verdict:
    if found.bad_batch:
        return Verdict("bad_batch", found.bad_batch)
    if found.bad_weights:
        return Verdict("diverging", found.bad_weights)
    why = found.forward or "the loss was not finite before the backward began"
    return Verdict("forward", why)


def _backward(found: Findings) -> Verdict:
    room = _room(found.largest)
    if found.scale is None:
        return Verdict(
            "bad_batch" if len(found.losses) >= CLEAN_ENOUGH else "unknown",
            f"no loss scale takes part and the loss was finite{room}",
        )
    at = f"clean at scale {scale_words(found.scale)}"
    if found.clean_windows >= CLEAN_ENOUGH:
        loss = ""
        if found.micro_loss is not None and found.losses:
            loss = (
                f"; its loss as passed to backward {found.micro_loss:.4g},"
                f" typical {statistics.median(found.losses):.4g}"
            )
        narrow = _no_room_for_an_ordinary_batch(found)
        so = ", but its loss is ordinary and the scale leaves little room" if narrow else ""
        return Verdict(
            "scale_too_high" if narrow else "bad_batch",
            f"{found.clean_windows} windows before it were {at} or above{so}{loss}{room}",
        )
    clean = _CLEAN.get(found.clean_windows, f"only {found.clean_windows} windows before it were")
    return Verdict(
        "scale_too_high",
        f"the loss was finite, and {clean} {at}{room}",
    )


def _no_room_for_an_ordinary_batch(found: Findings) -> bool:
    octaves = headroom_octaves(found.largest)
    if octaves is None or octaves > NARROW_OCTAVES or found.micro_loss is None or not found.losses:
        return False
    return abs(found.micro_loss) <= ORDINARY * abs(statistics.median(found.losses))


def _room(largest: float | None) -> str:
    octaves = headroom_octaves(largest)
    if octaves is None:
        return ""
    side = "below" if octaves >= 0 else "above"
    return (
        f"; largest finite scaled gradient {largest:.3g}, {abs(octaves):.1f} octaves {side} the"
        " largest value of fp16"
    )


def _grown(losses: Sequence[float]) -> str | None:
    """Whether the loss was running away, in words."""
    if len(losses) < RECENT + BEFORE:
        return None
    recent = statistics.median(losses[-RECENT:])
    before = statistics.median(losses[:-RECENT])
    if before > 0.0 and recent > GROWN * before and losses[-1] > losses[-RECENT]:
        return (
            f"the loss was growing: {recent:.4g} over the last {RECENT} windows,"
            f" {before:.4g} before them"
        )
    return None
