"""Prints a survey: a table on a terminal (rich), the same rows as plain text elsewhere.

Every figure is followed by where it comes from. Nothing here computes.
"""

import sys
from collections.abc import Sequence
from typing import TextIO

from mpwatch.planner.model import Model
from mpwatch.planner.pareto import thin
from mpwatch.planner.plans import Budget, Plan
from mpwatch.planner.presets import (
    PARAM_FRACTION_DEFECT,
    SIMPLE_TREE_DEFECT,
    param_fraction,
    simple_tree,
)
from mpwatch.planner.survey import Survey
from mpwatch.planner.units import format_bytes, format_seconds

COLUMNS = (
    "",
    "family",
    "precision",
    "optimizer",
    "b",
    "N",
    "batch",
    "checkpointing",
    "attention",
    "sharding",
    "peak",
    "source",
    "needs",
    "fits",
    "binding",
    "time/sample",
)
PHASES = ("forward", "backward", "optimizer")


def time_text(plan: Plan) -> str:
    """`12-27 ms` where the card's speed is known, `1.3x` over the fastest where it is not."""
    if plan.time_per_sample_range_s is not None:
        low, high = plan.time_per_sample_range_s
        return f"{format_seconds(low)}..{format_seconds(high)}"
    return "unknown" if plan.relative_time is None else f"{plan.relative_time:.2f}x fastest"


def cells(plan: Plan, recommended: Plan | None) -> tuple[str, ...]:
    """One row, in the order of `COLUMNS`; `*` marks the recommendation."""
    return (
        "*" if plan == recommended else "",
        plan.family,
        plan.precision,
        plan.optimizer,
        str(plan.micro_batch),
        str(plan.accumulation_steps),
        f"{plan.batch} ({plan.batch_deviation:+d})" if plan.batch_deviation else str(plan.batch),
        plan.checkpointing,
        plan.attention,
        plan.sharding,
        format_bytes(plan.peak_bytes),
        plan.labels["peak_bytes"],
        format_bytes(plan.needed_bytes),
        "yes" if plan.fits else "no",
        plan.binding,
        time_text(plan),
    )


def _plain(rows: Sequence[Sequence[str]], out: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=out)


def _rich(rows: Sequence[Sequence[str]], plans: Sequence[Plan]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("b", "N", "peak", "needs") else "left")
    for row, plan in zip(rows, plans, strict=True):
        table.add_row(*row, style=None if plan.fits else "dim")
    Console().print(table)


def phase_text(plan: Plan) -> str:
    """`forward 9.1 GB, backward 14.2 GB, optimizer 12.0 GB`."""
    known = [name for name in PHASES if name in plan.phase_bytes]
    return ", ".join(f"{name} {format_bytes(plan.phase_bytes[name])}" for name in known)


def plan_text(plan: Plan) -> str:
    """A plan in words: the configuration and how its batch is made."""
    lora = " with LoRA" if plan.family == "lora" else ""
    words = [f"{plan.precision}{lora}", plan.optimizer, f"{plan.checkpointing} checkpointing"]
    if plan.sharding != "none":
        words.append(plan.sharding)
    made = f"B = {plan.micro_batch} x {plan.accumulation_steps} x {plan.devices} = {plan.batch}"
    if plan.batch_deviation:
        made += f" ({plan.batch_deviation:+d} from the batch asked for)"
    return f"{', '.join(words)}, {plan.attention} attention; {made}"


def shown_plans(survey: Survey, rows: int) -> list[Plan]:
    """The recommendation first, then the others in their order, neighbours within 1 % left out."""
    first = [survey.recommended] if survey.recommended else []
    others = [plan for plan in survey.plans if plan != survey.recommended]
    points = [(float(plan.peak_bytes), plan.relative_time or 1.0) for plan in others]
    kept: list[Plan] = []
    for family in dict.fromkeys((plan.family, plan.fits) for plan in others):
        members = [i for i, plan in enumerate(others) if (plan.family, plan.fits) == family]
        kept += [others[i] for i in thin(points, members)]
    return [*first, *kept][: max(1, rows)]


def print_survey(survey: Survey, budget: Budget, rows: int) -> None:
    """Everything a person reads; `rows` limits the table."""
    out = sys.stdout
    shown = shown_plans(survey, rows)
    table = [cells(plan, survey.recommended) for plan in shown]
    if out.isatty():
        _rich(table, shown)
    else:
        _plain(table, out)
    left = len(survey.plans) - len(shown)
    if left > 0:
        print(f"({left} more rows: --rows {len(survey.plans)})")
    label = shown[0].labels if shown else {}
    print(
        f"{survey.candidates} candidates; activations: {label.get('activations', 'unknown')};"
        f" time: {label.get('time_per_sample_s', 'unknown')};"
        f" usable for the peak: {format_bytes(max(0.0, budget.largest_peak))}"
        f" of {format_bytes(budget.memory_bytes)}"
    )
    if survey.samples_factor is None:
        print("samples to target: unknown (give --noise-scale LOW..HIGH)")
    else:
        low, high = survey.samples_factor
        print(f"samples to target: {low:.2f} to {high:.2f} times those of tiny batches (estimated)")
    chosen = survey.recommended
    if chosen is None:
        print(f"nothing fits: {survey.reason}")
        return
    print(f"recommended: {plan_text(chosen)}")
    print(f"  by phase: {phase_text(chosen)} ({chosen.labels['peak_bytes']})")
    print(f"  because: {survey.reason}")
    if chosen.family != "exact":
        print(f"  changes the learning problem: {chosen.risk}")


def print_preset(name: str, budget: Budget, model: Model, survey: Survey) -> None:
    """A published rule as it stands, its defect, and the honest estimate beside it."""
    best = survey.recommended
    honest = f"{plan_text(best)}: {format_bytes(best.peak_bytes)}" if best else survey.reason
    if name == "param-fraction":
        low, high = param_fraction(model.parameters)
        print(f"param-fraction: micro-batch of {low:.3g} to {high:.3g} samples")
        print(f"  defect: {PARAM_FRACTION_DEFECT}")
    else:
        tree = simple_tree(budget.memory_bytes, model.parameters)
        for test in tree.tests:
            verdict = "fits" if test.fits else "too large"
            print(
                f"simple-tree: N={test.accumulation}: {format_bytes(test.needed_bytes)}, {verdict}"
            )
        decided = f"{tree.precision}, N={tree.accumulation}" if tree.precision else "no plan"
        print(f"simple-tree: {decided}")
        print(f"  defect: {SIMPLE_TREE_DEFECT}")
    print(f"  honest estimate: {honest}")
