"""What a log2 histogram of gradients says about number formats and loss scales.

Pure arithmetic on counts, no torch. MATH: binary exponents tell which values round to zero, which
lose bits and which overflow at a scale; exact for scales that are powers of two, since the limits
of the formats are powers of two as well, except the overflow limit, which lies inside one bin.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Bin i counts values whose binary exponent floor(log2|g|) is i - BIAS, as in the bits of fp32.
BINS = 256
BIAS = 127
# Bin 0 holds fp32 sub-normals (below 2^-126), the last bin Inf and NaN.
NON_FINITE = BINS - 1
DEFAULT_HEADROOM = 4.0
DEFAULT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: its largest value, and the powers of two where it begins to fail.

    `overflows_at` is the smallest magnitude that rounds beyond `largest` (round to nearest even);
    values below 2^`normal` lose bits, values below 2^`zero` become zero.
    """

    name: str
    largest: float
    overflows_at: float
    normal: int
    zero: int


FP16 = Format("fp16", 65504.0, 65520.0, -14, -25)
BF16 = Format("bf16", 3.3895313892515355e38, 3.39617752923046e38, -126, -134)
FORMATS: tuple[Format, ...] = (
    FP16,
    BF16,
    Format("e4m3fn", 448.0, math.nextafter(464.0, math.inf), -6, -10),
    Format("e5m2", 57344.0, 61440.0, -14, -17),
    Format("e4m3fnuz", 240.0, 248.0, -7, -11),
    Format("e5m2fnuz", 57344.0, 61440.0, -15, -18),
)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Gradients counted by binary exponent, exact zeros apart, with the largest finite magnitude.

    Of unscaled gradients where a scale is asked for below. `max_abs` 0.0: nothing but zeros.
    """

    counts: Sequence[int]
    zeros: int
    max_abs: float

    @property
    def total(self) -> int:
        """How many values were counted, zeros and non-finite ones included."""
        return sum(self.counts) + self.zeros

    @property
    def non_finite(self) -> int:
        """How many were Inf or NaN."""
        return self.counts[NON_FINITE]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all values, each from 0 to 1. `zeroed` leaves out what was zero before."""

    zeroed: float
    subnormal: float
    overflowed: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """Which scale fits a histogram, as powers of two.

    `limit` is the largest scale with the headroom asked for; `best` the smallest scale at which no
    more than the tolerated share rounds to zero, None where no scale below `limit` can do that.
    """

    limit: int
    best: int | None
    zeroed_at_limit: float

    @property
    def scale(self) -> float:
        """The scale to start with: the limit."""
        return math.ldexp(1.0, self.limit)

    @property
    def fits(self) -> bool:
        """Whether the format can hold these gradients at all."""
        return self.best is not None


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """One histogram of all the values of several."""
    counts, zeros, largest = [0] * BINS, 0, 0.0
    for histogram in histograms:
        for index, count in enumerate(histogram.counts):
            counts[index] += count
        zeros += histogram.zeros
        largest = max(largest, histogram.max_abs)
    return Histogram(counts, zeros, largest)


def shares(histogram: Histogram, target: Format = FP16, scale: float = 1.0) -> Shares:
    """What becomes of the values, times `scale`, in the format `target`.

    A bin that a limit cuts through (a scale that is no power of two; the overflow limit) is
    parted as if its values were spread evenly over their logarithm.
    """
    total = histogram.total
    if not total or not scale > 0.0 or math.isinf(scale):
        return Shares(0.0, 0.0, 0.0)
    shift = math.log2(scale)
    below_zero = _below(histogram, target.zero - shift)
    below_normal = _below(histogram, target.normal - shift)
    return Shares(
        zeroed=below_zero / total,
        subnormal=(below_normal - below_zero) / total,
        overflowed=_overflowed(histogram, target, shift) / total,
    )


def _below(histogram: Histogram, exponent: float) -> float:
    """How many non-zero values lie below 2^`exponent`."""
    found = 0.0
    for index, count in enumerate(histogram.counts[:NON_FINITE]):
        if count:
            found += count * min(1.0, max(0.0, exponent - (index - BIAS)))
    return found


def _overflowed(histogram: Histogram, target: Format, shift: float) -> float:
    limit = math.log2(target.overflows_at) - shift
    largest = histogram.max_abs
    finite = sum(histogram.counts[:NON_FINITE])
    found = 0.0
    if largest and math.log2(largest) >= limit:
        # The largest one overflows, whatever the others of its bin do.
        found = max(1.0, finite - _below(histogram, limit))
    return found + histogram.non_finite


def propose(
    histogram: Histogram,
    target: Format = FP16,
    headroom: float = DEFAULT_HEADROOM,
    tolerance: float = DEFAULT_TOLERANCE,
) -> Proposal | None:
    """The one-shot scale for unscaled gradients: k* = floor(log2(largest / (headroom * max))).

    Args:
        headroom: how many times larger the largest gradient may become before it overflows.
        tolerance: the share of values that may round to zero at a scale that still fits.

    Returns:
        None where there is no finite gradient that is not zero.
    """
    largest = histogram.max_abs
    if not largest > 0.0 or math.isinf(largest):
        return None
    limit = math.floor(math.log2(target.largest / headroom) - math.log2(largest))
    best = _smallest(histogram, target, tolerance, limit)
    return Proposal(limit, best, shares(histogram, target, math.ldexp(1.0, limit)).zeroed)


def _smallest(histogram: Histogram, target: Format, tolerance: float, limit: int) -> int | None:
    """The smallest k <= limit with at most `tolerance` zeroed at 2^k."""
    allowed = tolerance * histogram.total
    found = 0
    for index, count in enumerate(histogram.counts[:NON_FINITE]):
        found += count
        if found > allowed:
            # Everything below this bin may be lost, the bin itself must not be.
            k = target.zero - (index - BIAS)
            return k if k <= limit else None
    return limit


def range_octaves(histogram: Histogram, tolerance: float = DEFAULT_TOLERANCE) -> float | None:
    """The dynamic range these gradients need: log2(max) - log2(quantile `tolerance`)."""
    allowed = tolerance * histogram.total
    found = 0
    for index, count in enumerate(histogram.counts[:NON_FINITE]):
        found += count
        if found > allowed and histogram.max_abs > 0.0:
            return math.log2(histogram.max_abs) - (index - BIAS)
    return None


def share_error(share: float, sampled: int, total: int, z: float = 2.24) -> float:
    """How far the true share may lie from one that was found in `sampled` of `total` values.

    Wilson's interval for values drawn one by one at random, its farther end; `z` is a little more
    than two standard deviations, so that it covers well over 95 % of all draws. 0 where all values
    were looked at.
    """
    if sampled >= total or not sampled:
        return 0.0
    spread = z * z / sampled
    centre = (share + spread / 2.0) / (1.0 + spread)
    half = z / (1.0 + spread) * math.sqrt(share * (1.0 - share) / sampled + spread / sampled / 4.0)
    return max(centre + half - share, share - (centre - half))
