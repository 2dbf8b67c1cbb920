"""Why a plan is recommended, or why none fits: one line in words, whose figures add up. Pure."""

from collections.abc import Sequence

from mpwatch.planner.advice import Contenders, Rung
from mpwatch.planner.candidates import Table
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import EXACT, FAMILIES, RISKS
from mpwatch.planner.plans import Budget, Limits, Plan
from mpwatch.planner.units import format_apart, format_bytes

SLOW = 2.0
"""Factor in time from which a faster plan of another family is worth a word."""
RUNGS_NAMED = 2


def reason(
    rungs: Sequence[Rung],
    chosen: Plan,
    found: Contenders,
    budget: Budget,
    plans: Sequence[Plan],
) -> str:
    """Why `chosen`: what does not fit, and what it was taken from."""
    clauses = [_too_large([rung for rung in rungs if not rung.fits][-RUNGS_NAMED:], budget)]
    if chosen.family != EXACT:
        clauses.append(
            "no plan of a family that changes less fits;"
            f" family {chosen.family}: {RISKS[chosen.family]}"
        )
    if found.kept:
        clauses.append(
            "on a processor 16 bits are not known to be faster, so of the plans that fit only those"
            " in fp32 are looked at"
        )
    clauses += [_taken(chosen, found), _slowness(chosen, plans)]
    return "; ".join(clause for clause in clauses if clause)


def _too_large(failed: Sequence[Rung], budget: Budget) -> str:
    """Every size with as many figures as it takes to see that it is larger."""
    usable = max(0.0, budget.largest_peak)
    sizes = [format_apart(rung.peak_bytes, usable) for rung in failed]
    if not sizes:
        return ""
    named = " and ".join(
        f"{rung.at()} {'' if place else 'peaks '}at {peak}"
        for place, (rung, (peak, _)) in enumerate(zip(failed, sizes, strict=True))
    )
    return f"{named}, over the {max((limit for _, limit in sizes), key=len)} that are usable"


def _taken(chosen: Plan, found: Contenders) -> str:
    many, fastest = len(found.fitting), len(found.fastest)
    kind = "in fp32" if found.kept else f"of family {chosen.family}"
    if many == 1:
        return f"this is the only plan {kind} that fits"
    plans = f"of the {many} plans {kind} that fit"
    if not found.timed:
        return f"{plans}, whose times are unknown, this one gives up least"
    if fastest == 1:
        return f"{plans} this one is the fastest by estimate"
    if fastest == many:
        return f"{plans}, estimated to be equally fast within 1 %, this one gives up least"
    return (
        f"{plans}, {fastest} are within an estimated 1 % of the fastest, and this one gives up"
        " least of them"
    )


def _slowness(chosen: Plan, plans: Sequence[Plan]) -> str:
    """What the least intrusive family costs in time, where that is much; else nothing."""
    faster = [plan for plan in plans if plan.fits and plan.relative_time is not None]
    best = min(faster, key=lambda plan: plan.relative_time or 0.0, default=None)
    if best is None or chosen.relative_time is None or best.relative_time is None:
        return ""
    factor = chosen.relative_time / best.relative_time
    if factor < SLOW:
        return ""
    name = f"{best.precision} of family {best.family} ({best.risk})"
    return f"it is estimated to take {factor:.1f} times as long as {name}, which fits too"


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
