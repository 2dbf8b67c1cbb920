"""Which plan to take: the recommendation, and the ladder of concessions that leads there.

The ladder walks from an ordinary mixed-precision step towards ever larger concessions, cheapest
loss of speed first, families that change the learning problem last. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, structs

from mpwatch.planner.candidates import Split, Table
from mpwatch.planner.footprint import Setup, peak_moment
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import FAMILIES
from mpwatch.planner.plans import Budget, family_of
from mpwatch.planner.units import format_bytes

CLOSE = 0.01
"""Plans within 1 % of the fastest count as equally fast: the smaller concession wins."""

_CHECKPOINTING_COST = {"none": 0, "selective": 1, "full": 2}
_SHARDING_COST = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_PRECISION_COST = {"O1": 0, "O2": 1, "O0": 2, "O3": 3}
"""Where speed is not known: mixed precision is what people run."""


class Rung(Struct, frozen=True, kw_only=True):
    """One step of the ladder: everything above it is kept."""

    name: str
    setup: Setup
    micro_batch: int
    accumulation: int
    peak_bytes: float
    fits: bool

    def words(self) -> str:
        """`full checkpointing (b=2, N=32): 14.1 GB, fits`."""
        verdict = "fits" if self.fits else "too large"
        split = f"b={self.micro_batch}, N={self.accumulation}"
        return f"{self.name} ({split}): {format_bytes(self.peak_bytes)}, {verdict}"

    def at(self) -> str:
        """All that the rung is, and what it takes; the recommended plan is written alike."""
        setup = self.setup
        words = [setup.numerics.name, setup.optimizer.name]
        words.append(
            f"{'no' if setup.checkpointing == 'none' else setup.checkpointing} checkpointing"
        )
        words += [] if setup.sharding == "none" else [setup.sharding]
        words.append(f"{setup.attention} attention")
        return f"{', '.join(words)} (b={self.micro_batch}, N={self.accumulation})"


def concession(setup: Setup) -> tuple[int, int, int, int]:
    """How much a setup gives up: family, checkpointing, sharding, precision; smaller is better."""
    return (
        FAMILIES.index(family_of(setup)),
        _CHECKPOINTING_COST[setup.checkpointing],
        _SHARDING_COST[setup.sharding],
        _PRECISION_COST[setup.numerics.level],
    )


class Contenders(NamedTuple):
    """Rows that the recommendation is taken from: `fitting` ones of the least intrusive family,
    and among them the `fastest`, all of them where times are not known (`timed`).

    `kept`: on a processor 16 bits are not known to be faster, so fp32 is kept where it fits.
    """

    fitting: list[int]
    fastest: list[int]
    timed: bool
    kept: bool


def contenders(table: Table) -> Contenders:
    """What `recommend` chooses among; empty when nothing fits."""

    def setup(row: int) -> Setup:
        found: Setup = table.setups[table.setup_index[row]]
        return found

    def family(row: int) -> int:
        return FAMILIES.index(family_of(setup(row)))

    fitting = [row for row in range(len(table)) if table.fits[row]]
    least = min(map(family, fitting), default=0)
    rows = [row for row in fitting if family(row) == least]
    full = [row for row in rows if setup(row).numerics.level == "O0"]
    kept = 0 < len(full) < len(rows) and not any(each.cuda for each in table.setups)
    rows = full if kept else rows
    known = [float(table.seconds[row]) for row in rows if table.seconds[row] == table.seconds[row]]
    limit = min(known, default=0.0) * (1 + CLOSE)
    fastest = [row for row in rows if float(table.seconds[row]) <= limit] if known else rows
    return Contenders(rows, fastest, bool(known), kept)


def recommend(table: Table) -> int | None:
    """Row to take: of the least intrusive family with a plan that fits, the fastest; among those
    within 1 % of it, the smallest concession, then the smallest peak. None when nothing fits."""
    found = contenders(table)

    def order(row: int) -> tuple[tuple[int, ...], bool, int, float]:
        setup = table.setups[table.setup_index[row]]
        # As fast in fp32 as in 16 bits: then nothing is gained by giving precision up.
        lossless = found.timed and setup.numerics.level == "O0"
        *others, precision = concession(setup)
        return tuple(others), not lossless, precision, float(table.peak_bytes[row])

    return min(found.fastest, key=order, default=None)


def _best_split(setup: Setup, parts: Sequence[Split], budget: Budget) -> tuple[Split, float, bool]:
    """The largest micro-batch that fits, else the smallest peak."""
    peaks = []
    for micro_batch, accumulation in parts:
        steps = moments(setup, accumulating=accumulation > 1)
        peaks.append(peak_moment(steps, micro_batch).bytes_at(micro_batch))
    for split, peak in sorted(zip(parts, peaks, strict=True), key=lambda pair: -pair[0][0]):
        if budget.fits(peak):
            return split, peak, True
    smallest = min(range(len(parts)), key=lambda index: peaks[index])
    return parts[smallest], peaks[smallest], False


def ladder(choices: Sequence[Setup], parts: Sequence[Split], budget: Budget) -> list[Rung]:
    """Concessions in the order of least loss, each with its best split, up to the first that fits.

    Only setups that are among the candidates appear.
    """
    if not choices:
        return []
    available = set(map(_key, choices))
    start = min(choices, key=lambda setup: (concession(setup), setup.attention != "math"))
    current = structs.replace(start, checkpointing="none")
    if _key(current) not in available:
        current = start
    changes: list[tuple[str, dict[str, object]]] = [
        ("fused attention", {"attention": "sdpa"}),
        ("fused optimizer", {"optimizer": _optimizer(choices, "adamw-fused")}),
        ("selective checkpointing", {"checkpointing": "selective"}),
        ("full checkpointing", {"checkpointing": "full"}),
        ("16-bit weights with fp32 masters", {"numerics": _masters(choices)}),
        ("ZeRO-1", {"sharding": "zero1"}),
        ("ZeRO-2", {"sharding": "zero2"}),
        ("ZeRO-3 (FSDP)", {"sharding": "zero3"}),
        ("8-bit optimizer states", {"optimizer": _optimizer(choices, "adamw-8bit")}),
    ]
    rungs: list[Rung] = []
    whole = [parts[0]]
    for name, split_choice in (
        (current.numerics.name, whole),
        ("smaller micro-batch, N up", parts),
    ):
        split, peak, fits = _best_split(current, split_choice, budget)
        rungs.append(_rung(name, current, split, peak, fits))
        if fits:
            return rungs
    for name, change in changes:
        if None in change.values():
            continue
        candidate = structs.replace(current, **change)
        if candidate == current or _key(candidate) not in available:
            continue
        split, peak, fits = _best_split(candidate, parts, budget)
        if not fits and peak >= rungs[-1].peak_bytes:
            continue  # a concession that saves nothing is not made
        current = candidate
        rungs.append(_rung(name, current, split, peak, fits))
        if fits:
            return rungs
    return rungs + _family_rungs(choices, parts, budget)


def _family_rungs(choices: Sequence[Setup], parts: Sequence[Split], budget: Budget) -> list[Rung]:
    """The families that cannot be reached step by step: their smallest setup each."""
    found = []
    for family, name in (("lora", "LoRA"), ("pure_half", "pure half precision")):
        setups = [setup for setup in choices if family_of(setup) == family]
        if not setups:
            continue
        best = min(setups, key=lambda setup: _best_split(setup, parts, budget)[1])
        split, peak, fits = _best_split(best, parts, budget)
        found.append(_rung(name, best, split, peak, fits))
        if fits:
            break
    return found


def _rung(name: str, setup: Setup, split: Split, peak: float, fits: bool) -> Rung:
    return Rung(
        name=name,
        setup=setup,
        micro_batch=split[0],
        accumulation=split[1],
        peak_bytes=peak,
        fits=fits,
    )


def _key(setup: Setup) -> tuple[object, ...]:
    """Identity of a setup without comparing whole models."""
    return (
        setup.numerics.name,
        setup.optimizer.name,
        setup.attention,
        setup.checkpointing,
        setup.sharding,
        setup.lora_rank,
    )


def _masters(choices: Sequence[Setup]) -> object:
    """The O2 precision among the candidates, or None."""
    found = [setup.numerics for setup in choices if setup.numerics.level == "O2"]
    return found[0] if found else None


def _optimizer(choices: Sequence[Setup], name: str) -> object:
    found = [setup.optimizer for setup in choices if setup.optimizer.name == name]
    return found[0] if found else None
