"""Every configuration worth asking about, evaluated in bulk.

Enumerates setups (precision, attention, checkpointing, optimizer, sharding) and splits of the
batch (micro-batch, N), and evaluates them as numpy arrays: 10^5 in well under a second. numpy is
imported here and only when asked; a single estimate needs none.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, structs

from mpwatch.errors import UsageError
from mpwatch.planner.activations import ATTENTIONS
from mpwatch.planner.cards import Card, half_formats
from mpwatch.planner.footprint import Moment, Setup
from mpwatch.planner.model import Model, PlainModel, TrackedModel, TransformerShape
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import (
    LORA,
    PRECISIONS,
    SHARDINGS,
    Numerics,
    find_optimizer,
    find_precision,
)
from mpwatch.planner.plans import Budget, Limits, family_of, seconds_per_sample

Split = tuple[int, int]
"""(micro-batch, accumulation steps)"""


def import_numpy() -> Any:
    """numpy, or one line that names the extra. Raises UsageError."""
    try:
        import numpy
    except ImportError as error:
        raise UsageError(
            "plan compares candidates with numpy: pip install 'mpwatch[plan]'"
        ) from error
    return numpy


def splits(limits: Limits) -> list[Split]:
    """Ways to write B = b N D; where none is exact, those that miss it least.

    Raises:
        UsageError: the bounds on N and on the micro-batch leave nothing.
    """
    found: list[tuple[int, Split]] = []
    for accumulation in range(1, limits.max_accumulation + 1):
        ranks = accumulation * limits.devices
        below = limits.batch // ranks
        for micro_batch in {below, below + 1}:
            total = micro_batch * ranks
            if micro_batch >= limits.min_micro_batch and total >= limits.min_batch:
                found.append((abs(total - limits.batch), (micro_batch, accumulation)))
    if not found:
        raise UsageError(
            f"no split of batch {limits.batch}: --min-micro-batch {limits.min_micro_batch} and"
            f" --min-batch {limits.min_batch} leave none with N <= {limits.max_accumulation}"
        )
    least = min(miss for miss, _ in found)
    return sorted({split for miss, split in found if miss == least}, key=lambda split: split[1])


def allowed_precisions(card: Card, limits: Limits) -> list[Numerics]:
    """Precisions to plan with: what was asked for, else one 16-bit format that the card runs well.

    Raises:
        UsageError: an asked-for precision is one that the card cannot run usefully.
    """
    formats = half_formats(card)
    if not limits.precisions:
        names = ["O0", *(f"{level}:{formats[0]}" for level in ("O1", "O2", "O3") if formats)]
        return [PRECISIONS[name] for name in names]
    chosen = [
        find_precision(f"{name}:{formats[0]}" if name in ("O1", "O2", "O3") and formats else name)
        for name in dict.fromkeys(limits.precisions)
    ]
    for numerics in chosen:
        _, _, half = numerics.name.partition(":")
        if half and half not in formats:
            able = ", ".join(formats) or "fp32 only"
            raise UsageError(f"{card.name} has no fast {half} ({numerics.name}): it runs {able}")
    return chosen


def _optimizers(limits: Limits) -> list[str]:
    """Implementations of the person's optimizer, then the 8-bit one."""
    if limits.optimizer == "adamw":
        return ["adamw-foreach", "adamw-fused", "adamw-8bit"]
    find_optimizer(limits.optimizer)
    return [limits.optimizer]


def _memory_savers(model: Model) -> Iterable[tuple[str, str]]:
    """(attention, checkpointing) pairs that make sense for this model."""
    if isinstance(model, TrackedModel):
        return [("as written", name) for name in model.checkpointings]
    if isinstance(model, PlainModel):
        return [("unknown", "none")]
    return [
        (attention, checkpointing)
        for attention in ATTENTIONS
        for checkpointing in ("none", "selective", "full")
        if not (attention == "sdpa" and checkpointing == "selective")  # nothing left to recompute
    ]


def setups(model: Model, card: Card, limits: Limits) -> list[Setup]:
    """All setups of the allowed families; nothing that a family does not contain twice.

    Raises:
        UsageError: a limit contradicts the card or the model.
    """
    if isinstance(model, TransformerShape) and limits.lora_rank > model.hidden:
        raise UsageError(f"--lora-rank {limits.lora_rank} exceeds the width {model.hidden}")
    shardings = ("none",) if limits.devices == 1 else SHARDINGS[1:]
    found: list[Setup] = []
    for numerics, optimizer, (attention, checkpointing), sharding in itertools.product(
        allowed_precisions(card, limits), _optimizers(limits), _memory_savers(model), shardings
    ):
        if isinstance(model, TrackedModel) and numerics.name not in model.precisions:
            continue
        setup = Setup(
            model=model,
            numerics=numerics,
            optimizer=find_optimizer(optimizer),
            attention=attention,
            checkpointing=checkpointing,
            sharding=sharding,
            devices=limits.devices,
            cuda=limits.cuda,
        )
        eight_bit_half = numerics.level == "O3" and setup.optimizer.block is not None
        if family_of(setup) in limits.families and not eight_bit_half:
            found.append(setup)
        if LORA in limits.families and isinstance(model, TransformerShape):
            found += _with_adapters(setup, limits.lora_rank)
    return found


def _with_adapters(setup: Setup, rank: int) -> list[Setup]:
    """The LoRA twin of an ordinary mixed-precision setup; adapters are too small to quantise."""
    ordinary = setup.optimizer.block is None and setup.numerics.level in ("O1", "O2")
    if not ordinary or setup.optimizer.implementation == "fused":
        return []
    return [structs.replace(setup, lora_rank=rank)]


class Table(Struct, frozen=True, kw_only=True):
    """Evaluated candidates: parallel numpy arrays and the setup that each row belongs to."""

    setups: Sequence[Setup]
    setup_index: Any
    micro_batch: Any
    accumulation: Any
    peak_bytes: Any
    seconds: Any
    """per sample, middle of the band; nan where unknown"""
    fits: Any

    def __len__(self) -> int:
        return len(self.micro_batch)


def seconds_at(table: Table, card: Card, band: int) -> Any:
    """Seconds per sample at another end of the time band; nan where unknown."""
    numpy = import_numpy()
    seconds = numpy.full(len(table), numpy.nan)
    for index, setup in enumerate(table.setups):
        rows = table.setup_index == index
        b, n = table.micro_batch[rows].astype(float), table.accumulation[rows].astype(float)
        found = seconds_per_sample(setup, card, b, n, band)
        if found is not None:
            seconds[rows] = found
    return seconds


def bulk_peaks(steps: Sequence[Moment], micro_batch: Any) -> Any:
    """Peak bytes for an array of micro-batches."""
    numpy = import_numpy()
    fixed = numpy.array([moment.fixed_bytes for moment in steps])
    slope = numpy.array([moment.sample_bytes for moment in steps])
    return (fixed[:, None] + slope[:, None] * micro_batch[None, :]).max(axis=0)


def evaluate(choices: Sequence[Setup], parts: Sequence[Split], card: Card, budget: Budget) -> Table:
    """Peak, time and fit of every setup with every split."""
    numpy = import_numpy()
    b = numpy.array([micro_batch for micro_batch, _ in parts], dtype=float)
    n = numpy.array([accumulation for _, accumulation in parts], dtype=float)
    several = n > 1
    peaks, seconds = [], []
    for setup in choices:
        single = bulk_peaks(moments(setup, accumulating=False), b)
        repeated = bulk_peaks(moments(setup, accumulating=True), b)
        peaks.append(numpy.where(several, repeated, single))
        time = seconds_per_sample(setup, card, b, n, 1)
        seconds.append(numpy.full(len(parts), numpy.nan) if time is None else time)
    count = len(choices)
    all_peaks = numpy.concatenate(peaks) if count else numpy.empty(0)
    return Table(
        setups=choices,
        setup_index=numpy.repeat(numpy.arange(count), len(parts)),
        micro_batch=numpy.tile(b, count).astype(int),
        accumulation=numpy.tile(n, count).astype(int),
        peak_bytes=all_peaks,
        seconds=numpy.concatenate(seconds) if count else numpy.empty(0),
        fits=all_peaks <= budget.largest_peak,
    )


def table_front(table: Table, rows: Any) -> list[int]:
    """Rows (of those given) on the exact front of peak and time, by rising peak.

    Where time is unknown the front is the smallest peak alone.
    """
    numpy = import_numpy()
    rows = numpy.asarray(rows)
    if not len(rows):
        return []
    time = numpy.nan_to_num(table.seconds[rows], nan=1.0)
    order = numpy.lexsort((time, table.peak_bytes[rows]))
    peak, time = table.peak_bytes[rows][order], time[order]
    best_before = numpy.concatenate(([numpy.inf], numpy.minimum.accumulate(time)[:-1]))
    improves = time < best_before
    # Duplicates of a front point are kept: same peak and time as the row that improved.
    keep = improves.copy()
    for place in numpy.flatnonzero(improves):
        follower = place + 1
        while (
            follower < len(order)
            and peak[follower] == peak[place]
            and time[follower] == time[place]
        ):
            keep[follower] = True
            follower += 1
    return [int(row) for row in rows[order[keep]]]
