"""Counts gradients by binary exponent: all of them in chunks, or some drawn at random.

An exponent is read from the bits of fp32, no logarithm taken. Each way gives one tensor on the
gradients' device, so that one read brings all of it. Draws from a generator of its own: the
script's random streams never move. Called by `gradient_watch`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpwatch_agent.distribution import BINS, Histogram

# Elements per chunk: at most 8 bytes of scratch for each keeps a chunk below 64 MB.
CHUNK = 1 << 22
# Where the half with the exponent lies in a pair of int16 that are one fp32.
_HIGH = 1 if sys.byteorder == "little" else 0
# Columns of a row: the bins, the zeros, the largest finite magnitude.
ROW = BINS + 2


@dataclass(frozen=True)
class Counts:
    """One row per tensor on its device; `looked_at` of `sizes` elements were counted in each."""

    rows: torch.Tensor
    looked_at: list[int]
    sizes: list[int]


def histogram_of(row: Sequence[float]) -> Histogram:
    """A row of `Counts.rows`, once it has been read."""
    return Histogram([int(count) for count in row[:BINS]], int(row[BINS]), float(row[BINS + 1]))


@torch.no_grad()
def exact(gradients: Sequence[torch.Tensor], factor: float = 1.0) -> Counts:
    """Count every element of `gradients`, each times `factor`."""
    rows = torch.stack([_row_of(gradient, factor) for gradient in gradients])
    sizes = [gradient.numel() for gradient in gradients]
    return Counts(rows, sizes, sizes)


def _row_of(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    flat = gradient.reshape(-1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    ends = []
    for start in range(0, flat.numel(), CHUNK):
        part = _times(flat[start : start + CHUNK], factor)
        counts += torch.bincount(_exponents(part), minlength=BINS)
        ends.append(_largest(part))
    largest = torch.stack(ends).amax()
    if not _is_finite(largest):
        largest = torch.stack([_largest_finite(flat, factor)]).amax()
    zeros = counts[0]
    if bool(zeros):
        # The first bin holds zeros and fp32 sub-normals alike.
        zeros = zeros - sum(
            torch.count_nonzero(_below_normal(_times(flat[start : start + CHUNK], factor)))
            for start in range(0, flat.numel(), CHUNK)
        )
    return _row(counts, zeros, largest)


def _row(counts: torch.Tensor, zeros: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    row = torch.empty(ROW, dtype=torch.float64, device=counts.device)
    row[:BINS] = counts
    row[0] -= zeros
    row[BINS], row[BINS + 1] = zeros, largest
    return row


@torch.no_grad()
def sampled(
    gradients: Sequence[torch.Tensor],
    draws: Sequence[int],
    generator: torch.Generator,
    factor: float = 1.0,
) -> Counts:
    """Count `draws[i]` elements of `gradients[i]`, drawn one by one; all where that is no more.

    Single elements rather than blocks: neighbours are alike (a row of an embedding that was not
    used is all zeros), and what a sample of them leaves unsaid could not be stated.
    """
    values, looked_at, sizes = [], [], []
    for gradient, count in zip(gradients, draws, strict=True):
        taken = take(gradient, places_of(gradient, count, generator))
        values.append(taken.float())
        looked_at.append(taken.numel())
        sizes.append(gradient.numel())
    rows = _rows_of(_times(torch.cat(values), factor), looked_at)
    # The largest one of all: a sample would miss it, and a scale hangs on it.
    largest = torch.stack([_largest(gradient).float() for gradient in gradients]).double() * factor
    rows[:, BINS + 1] = torch.where(torch.isfinite(largest), largest, rows[:, BINS + 1])
    return Counts(rows, looked_at, sizes)


def places_of(tensor: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor | None:
    """Where to look in a tensor: `count` places drawn with replacement; None: everywhere."""
    size = tensor.numel()
    if size <= count:
        return None
    return torch.randint(size, (count,), generator=generator, device=tensor.device)


def take(tensor: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """The elements of `tensor` at `places`."""
    return tensor.reshape(-1) if places is None else torch.take(tensor, places)


def _rows_of(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """A row for each segment of `values`: one batched operation for all tensors."""
    device, count = values.device, len(lengths)
    segment = torch.repeat_interleave(
        torch.arange(count, device=device), torch.tensor(lengths, device=device)
    )
    exponents = _exponents(values).long() + segment * BINS
    bins = torch.bincount(exponents, minlength=count * BINS).view(count, BINS)
    magnitudes = values.abs()
    finite = torch.where(torch.isfinite(magnitudes), magnitudes, 0.0)
    largest = torch.zeros(count, device=device).scatter_reduce_(0, segment, finite, "amax")
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    zeros.index_add_(0, segment, (values == 0).long())
    rows = torch.empty(count, ROW, dtype=torch.float64, device=device)
    rows[:, :BINS] = bins
    rows[:, 0] -= zeros
    rows[:, BINS], rows[:, BINS + 1] = zeros, largest
    return rows


def _exponents(values: torch.Tensor) -> torch.Tensor:
    """The biased exponents of contiguous fp32 values, as uint8."""
    halves = values.view(torch.int16)[_HIGH::2]
    # The sign is shifted out of the lowest byte's reach.
    return (halves >> 7).to(torch.uint8)


def _times(part: torch.Tensor, factor: float) -> torch.Tensor:
    """`part` as contiguous fp32 values, times `factor`."""
    if part.dtype is not torch.float32 or factor != 1.0:
        return part.float() * factor if factor != 1.0 else part.float()
    return part.contiguous()


def _largest(part: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(part)
    return torch.maximum(-low, high)


def _largest_finite(flat: torch.Tensor, factor: float) -> torch.Tensor:
    parts = (flat[start : start + CHUNK] for start in range(0, flat.numel(), CHUNK))
    ends = []
    for part in parts:
        values = _times(part, factor)
        ends.append(_largest(torch.where(torch.isfinite(values), values, 0.0)))
    return torch.stack(ends).amax()


def _is_finite(value: torch.Tensor) -> bool:
    return bool(torch.isfinite(value))


def _below_normal(part: torch.Tensor) -> torch.Tensor:
    """Non-zero where a value is a sub-normal of fp32."""
    return torch.where(part.abs() < torch.finfo(torch.float32).tiny, part, 0.0)
