"""From counted gradients to the event: layers, formats, the best scale and its forecast.

Pure once the numbers are on the host. Shares that come from a sample carry their error.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpwatch.events import FormatShares, GradientsSampled, LayerGradients, ScaleForecast
from mpwatch_agent import distribution
from mpwatch_agent.distribution import BIAS, BINS, FORMATS, FP16, NON_FINITE, Histogram
from mpwatch_agent.exponents import ROW

if TYPE_CHECKING:
    from mpwatch_agent.gradient_watch import Sample

ALL = "all"
# Powers of two around the scale of now that the forecast covers.
FORECAST = range(-8, 9)


class Reading(NamedTuple):
    """Counts and updates on the host, a row per tensor."""

    rows: list[list[float]]
    looked_at: list[int]
    sizes: list[int]
    updates: list[list[float]] | None

    @classmethod
    def of(cls, read: list[list[float]], sample: "Sample") -> "Reading":
        """Part what was read into counts and, behind them, updates."""
        counts, width = sample.counts, ROW
        updates = [row[width:] for row in read] if len(read[0]) > width else None
        return cls([row[:width] for row in read], counts.looked_at, counts.sizes, updates)


def report(reading: Reading, sample: "Sample", note: str = "") -> GradientsSampled:
    """The event of one sample."""
    everything = list(range(len(reading.rows)))
    scale = sample.scale or 1.0
    whole = _weighted(reading, everything)
    proposal = distribution.propose(whole)
    layers = [_layer(ALL, reading, everything, scale)]
    if len(sample.layers) > 1 or ALL not in sample.layers:
        layers += [
            _layer(name, reading, positions, scale) for name, positions in sample.layers.items()
        ]
    return GradientsSampled(
        step=sample.step,
        layers=tuple(layers),
        loss_scale=sample.scale,
        exact=sample.exact,
        stored_as=sample.stored_as,
        best_octave=None if proposal is None else proposal.best,
        limit_octave=None if proposal is None else proposal.limit,
        forecast=tuple(_forecast(whole, scale, k) for k in FORECAST),
        note=note or _note(sample),
    )


def _note(sample: "Sample") -> str:
    stored = sample.stored_as
    parts = []
    if "float16" in stored.split(", "):
        parts.append("gradients are stored in fp16: what was lost before this is not seen")
    elif sample.autocast:
        parts.append(
            "under autocast gradients were made in 16 bits: what that lost is not seen here, nor"
            " are activation gradients, which overflow first"
        )
    return "; ".join(parts)


def _weighted(reading: Reading, positions: Sequence[int]) -> Histogram:
    """The histogram of all elements of some tensors, scaled up where only some were counted."""
    counts, zeros, largest = [0.0] * BINS, 0.0, 0.0
    for position in positions:
        row = reading.rows[position]
        weight = reading.sizes[position] / max(1, reading.looked_at[position])
        for index in range(BINS):
            counts[index] += row[index] * weight
        zeros += row[BINS] * weight
        largest = max(largest, row[BINS + 1])
    return Histogram([round(count) for count in counts], round(zeros), largest)


def _layer(name: str, reading: Reading, positions: Sequence[int], scale: float) -> LayerGradients:
    histogram = _weighted(reading, positions)
    total = max(1, histogram.total)
    filled = [index for index in range(NON_FINITE) if histogram.counts[index]]
    first, last = (filled[0], filled[-1]) if filled else (0, -1)
    shares = [(each.name, distribution.shares(histogram, each, scale)) for each in FORMATS]
    update = _update(reading, positions)
    return LayerGradients(
        name=name,
        values=sum(reading.sizes[position] for position in positions),
        looked_at=sum(reading.looked_at[position] for position in positions),
        max_abs=histogram.max_abs,
        zeros=histogram.zeros / total,
        non_finite=histogram.non_finite / total,
        error=_short(share_error(reading, positions, 0.5)),
        first_exponent=first - BIAS,
        counts=tuple(histogram.counts[first : last + 1]),
        shares=tuple(
            FormatShares(
                format=target,
                zeroed=_short(found.zeroed),
                subnormal=_short(found.subnormal),
                overflowed=_short(found.overflowed),
                zeroed_error=_short(share_error(reading, positions, found.zeroed)),
                subnormal_error=_short(share_error(reading, positions, found.subnormal)),
                overflowed_error=_short(share_error(reading, positions, found.overflowed)),
            )
            for target, found in shares
        ),
        update_median=update[0],
        update_small=update[1],
        update_small_fp16=update[2],
    )


def share_error(reading: Reading, positions: Sequence[int], share: float) -> float:
    """How far a share of these tensors' elements may be off, because only some were counted."""
    total = sum(reading.sizes[position] for position in positions)
    spread = sum(
        reading.sizes[position] ** 2 / reading.looked_at[position]
        for position in positions
        if reading.looked_at[position] < reading.sizes[position]
    )
    if not spread:
        return 0.0
    # Drawn with replacement: as many draws as there are values do not see them all.
    drawn = max(1, min(total - 1, int(total * total / spread)))
    return distribution.share_error(share, drawn, total)


def _update(
    reading: Reading, positions: Sequence[int]
) -> tuple[float | None, float | None, float | None]:
    if reading.updates is None:
        return None, None, None
    weights = [reading.sizes[position] for position in positions]
    rows = [reading.updates[position] for position in positions]
    total = sum(weights)
    # The median over several tensors: that of the largest one.
    largest = rows[weights.index(max(weights))]
    below = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) / total for i in (1, 2)]
    median = largest[0] if math.isfinite(largest[0]) else None
    return median, _short(below[0]), _short(below[1])


def _forecast(histogram: Histogram, scale: float, k: int) -> ScaleForecast:
    found = distribution.shares(histogram, FP16, scale * 2.0**k)
    return ScaleForecast(
        octaves=k,
        zeroed=_short(found.zeroed),
        subnormal=_short(found.subnormal),
        overflowed=_short(found.overflowed),
    )


def _short(share: float) -> float:
    return float(f"{share:.6g}")
