"""One question answered in full: candidates, fronts, recommendation and its reason.

Joins the other modules; the `plan` verb prints what this returns. Pure.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from mpwatch.planner.advice import Rung, contenders, ladder, recommend
from mpwatch.planner.candidates import (
    Split,
    Table,
    evaluate,
    import_numpy,
    seconds_at,
    setups,
    splits,
    table_front,
)
from mpwatch.planner.cards import Card
from mpwatch.planner.model import Model, PlainModel, TrackedModel
from mpwatch.planner.numerics import FAMILIES
from mpwatch.planner.plans import (
    ESTIMATED,
    TRACKED,
    UNKNOWN,
    Budget,
    Limits,
    Plan,
    family_of,
    make_plan,
)
from mpwatch.planner.reasons import reason, shortfall
from mpwatch.planner.timing import samples_factor, soonest_accumulation


class Survey(Struct, frozen=True, kw_only=True):
    """The answer."""

    recommended: Plan | None
    plans: tuple[Plan, ...]
    """fronts first (overall, then of each family), then the nearest that do not fit"""
    front: tuple[Plan, ...]
    """the overall front among plans that fit"""
    rungs: tuple[Rung, ...]
    reason: str
    candidates: int
    samples_factor: tuple[float, float] | None
    """samples to the target over those of tiny batches, ends of the noise scale's interval"""
    soonest_accumulation: tuple[float, float] | None
    """N at which these devices would reach the target soonest, at the recommended micro-batch"""


def plan_of(table: Table, row: int, card: Card, budget: Budget, batch: int) -> Plan:
    """The full plan of one row of the table."""
    setup = table.setups[table.setup_index[row]]
    plan = make_plan(
        setup,
        int(table.micro_batch[row]),
        int(table.accumulation[row]),
        card=card,
        budget=budget,
        batch=batch,
    )
    labels = {**plan.labels, "activations": ESTIMATED}
    if isinstance(setup.model, TrackedModel):
        labels["activations"] = TRACKED  # at both ends of the micro-batch, affine in between
    elif isinstance(setup.model, PlainModel):
        labels["activations"] = UNKNOWN
    return structs.replace(plan, labels=labels)


def _rows_of(table: Table, family: str) -> list[int]:
    members = [i for i, setup in enumerate(table.setups) if family_of(setup) == family]
    numpy = import_numpy()
    return [int(row) for row in numpy.flatnonzero(numpy.isin(table.setup_index, members))]


def _nearest(table: Table, rows: Sequence[int]) -> list[int]:
    """For each precision the row with the smallest peak: what came closest to fitting."""
    best: dict[str, int] = {}
    for row in rows:
        name = table.setups[table.setup_index[row]].numerics.name
        if name not in best or table.peak_bytes[row] < table.peak_bytes[best[name]]:
            best[name] = row
    return sorted(best.values(), key=lambda row: float(table.peak_bytes[row]))


def _chosen_rows(table: Table) -> tuple[list[int], list[int]]:
    """(rows of the overall fitting front, all rows worth printing in their order)."""
    numpy = import_numpy()
    overall = table_front(table, numpy.flatnonzero(table.fits))
    shown = list(overall)
    for family in FAMILIES:
        rows = _rows_of(table, family)
        shown += table_front(table, [row for row in rows if table.fits[row]])
    for family in FAMILIES:
        rows = [row for row in _rows_of(table, family) if not table.fits[row]]
        shown += _nearest(table, rows)
    return overall, list(dict.fromkeys(shown))


def _robust_rows(table: Table, card: Card) -> set[int]:
    """Rows on the fitting front at both ends of the time band."""
    numpy = import_numpy()
    fitting = numpy.flatnonzero(table.fits)
    ends = [
        set(table_front(structs.replace(table, seconds=seconds_at(table, card, band)), fitting))
        for band in (0, 2)
    ]
    return ends[0] & ends[1]


def _relative(plans: Sequence[Plan], seconds: Sequence[float]) -> tuple[Plan, ...]:
    """Fill in `relative_time`, over the fastest of these plans."""
    known = [value for value in seconds if value == value]
    fastest = min(known, default=1.0)
    return tuple(
        structs.replace(plan, relative_time=value / fastest if value == value else None)
        for plan, value in zip(plans, seconds, strict=True)
    )


def survey(model: Model, card: Card, budget: Budget, limits: Limits) -> Survey:
    """Answer which configurations of this model fit and which to take.

    Raises:
        UsageError: the limits contradict each other or the card, or numpy is missing.
    """
    choices = setups(model, card, limits)
    parts: list[Split] = splits(limits)
    if isinstance(model, PlainModel):
        parts = parts[-1:]  # activations are unknown: only the smallest micro-batch is proposed
    table = evaluate(choices, parts, card, budget)
    overall, rows = _chosen_rows(table)
    chosen = recommend(table)
    if chosen is not None:
        rows = list(dict.fromkeys([*rows, chosen]))
    robust = _robust_rows(table, card)
    plans = _relative(
        [
            structs.replace(plan_of(table, row, card, budget, limits.batch), robust=row in robust)
            for row in rows
        ],
        [float(table.seconds[row]) for row in rows],
    )
    by_row = dict(zip(rows, plans, strict=True))
    rungs = ladder(choices, parts, budget)
    text = (
        reason(rungs, by_row[chosen], contenders(table), budget, plans)
        if chosen is not None
        else shortfall(table, budget, limits)
    )
    if isinstance(model, PlainModel):
        text += "; activations are unknown and not counted: give the shape, or --model"
    factor = soonest = None
    if limits.noise_scale is not None:
        low, high = limits.noise_scale
        factor = (samples_factor(limits.batch, high), samples_factor(limits.batch, low))
        if chosen is not None:
            setup = choices[table.setup_index[chosen]]
            micro_batch = int(table.micro_batch[chosen])
            soonest = soonest_accumulation(setup, card, micro_batch, limits.noise_scale)
    return Survey(
        recommended=by_row[chosen] if chosen is not None else None,
        plans=plans,
        front=tuple(by_row[row] for row in overall),
        rungs=tuple(rungs),
        reason=text,
        candidates=len(table),
        samples_factor=factor,
        soonest_accumulation=soonest,
    )
