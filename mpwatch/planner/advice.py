"""Which plan to take and why: recommendation, ladder of concessions, what would have to give.

The ladder walks from an ordinary mixed-precision step towards ever larger concessions, cheapest
loss of speed first, families that change the learning problem last. Pure.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from mpwatch.planner.candidates import Split, Table
from mpwatch.planner.footprint import Setup, peak_moment
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import EXACT, FAMILIES, RISKS
from mpwatch.planner.plans import Budget, Limits, Plan, family_of
from mpwatch.planner.units import format_bytes

SLOW = 2.0
"""Factor in time from which a faster plan of another family is worth a word."""
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


def concession(setup: Setup) -> tuple[int, int, int, int]:
    """How much a setup gives up: family, checkpointing, sharding, precision; smaller is better."""
    return (
        FAMILIES.index(family_of(setup)),
        _CHECKPOINTING_COST[setup.checkpointing],
        _SHARDING_COST[setup.sharding],
        _PRECISION_COST[setup.numerics.level],
    )


def _kept_precision(table: Table, rows: list[int]) -> list[int]:
    """On a processor 16 bits are not known to be faster: fp32 is kept where it fits."""
    full = [row for row in rows if table.setups[table.setup_index[row]].numerics.level == "O0"]
    on_processor = not any(setup.cuda for setup in table.setups)
    return full if full and on_processor else rows


def recommend(table: Table) -> int | None:
    """Row to take: of the least intrusive family with a plan that fits, the fastest; among those
    within 1 % of it, the smallest concession, then the smallest peak. None when nothing fits."""
    fitting = [row for row in range(len(table)) if table.fits[row]]
    if not fitting:
        return None

    def family(row: int) -> int:
        return FAMILIES.index(family_of(table.setups[table.setup_index[row]]))

    least = min(family(row) for row in fitting)
    rows = _kept_precision(table, [row for row in fitting if family(row) == least])
    known = [float(table.seconds[row]) for row in rows if table.seconds[row] == table.seconds[row]]
    if known:
        limit = min(known) * (1 + CLOSE)
        rows = [row for row in rows if float(table.seconds[row]) <= limit]

    def order(row: int) -> tuple[tuple[int, ...], bool, int, float]:
        setup = table.setups[table.setup_index[row]]
        # As fast in fp32 as in 16 bits: then nothing is gained by giving precision up.
        lossless = bool(known) and setup.numerics.level == "O0"
        *others, precision = concession(setup)
        return tuple(others), not lossless, precision, float(table.peak_bytes[row])

    return min(rows, key=order)


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


def reason(rungs: Sequence[Rung], chosen: Setup, *, timed: bool) -> str:
    """Why this family and these concessions, in one line."""
    family = family_of(chosen)
    failed = [rung.words() for rung in rungs if not rung.fits]
    fastest = "within 1 % of the fastest" if timed else "that fit (times are unknown)"
    taken = f"of the plans {fastest}, the one that gives up least is taken"
    if not failed:
        return f"{rungs[0].words()} without any concession; {taken}"
    tail = f"; family {family}: {RISKS[family]}" if family != EXACT else ""
    return f"{'; '.join(failed[-2:])}; {taken}{tail}"


def slowness(chosen: Plan, plans: Sequence[Plan]) -> str:
    """What the least intrusive family costs in time, where that is much; else nothing."""
    faster = [plan for plan in plans if plan.fits and plan.relative_time is not None]
    best = min(faster, key=lambda plan: plan.relative_time or 0.0, default=None)
    if best is None or chosen.relative_time is None or best.relative_time is None:
        return ""
    factor = chosen.relative_time / best.relative_time
    if factor < SLOW:
        return ""
    name = f"{best.precision} of family {best.family} ({best.risk})"
    return f"; it is estimated to take {factor:.1f} times as long as {name}, which fits too"


def shortfall(table: Table, budget: Budget, limits: Limits) -> str:
    """What would have to give when nothing fits: one line with the cause."""
    choices = table.setups
    if not len(table):
        return "no configuration is left by the constraints: allow more families or precisions"
    row = min(range(len(table)), key=lambda index: float(table.peak_bytes[index]))
    best, peak = choices[table.setup_index[row]], float(table.peak_bytes[row])
    micro_batch = int(table.micro_batch[row])
    room = max(0.0, budget.largest_peak)
    static = min(
        sum(step.fixed_bytes for step in moments(setup, accumulating=False)[-1:])
        for setup in choices
    )
    needs = f"{format_bytes(budget.needed(peak))} of device memory"
    if static > room:
        cause = (
            f"weights, gradients and states alone need {format_bytes(static)} and"
            f" {format_bytes(room)} is usable: accumulation cannot help"
        )
    else:
        cause = "activations and logits do not fit beside weights and states"
    how = f"{best.numerics.name}, {best.checkpointing} checkpointing, b={micro_batch}"
    cause += f"; the smallest peak is {format_bytes(peak)} ({how})"
    left = [name for name in FAMILIES if name not in limits.families]
    others = []
    if micro_batch > limits.min_micro_batch and static <= room:
        others.append("accumulate more (--max-accumulation)")
    others.append("shard over more devices (--devices N)")
    if left:
        others.append(f"allow other families ({', '.join(left)})")
    return f"{cause}; it takes {needs}" + (f", or {' or '.join(others)}" if others else "")
