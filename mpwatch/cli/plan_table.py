"""Prints a survey: a table on a terminal (rich), the same rows as plain text elsewhere.

Every figure is followed by where it comes from. Nothing here computes.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from mpwatch.planner.pareto import thin
from mpwatch.planner.plans import Budget, Plan
from mpwatch.planner.survey import Survey
from mpwatch.planner.units import format_bytes, format_seconds

COLUMNS: dict[str, Callable[[Plan], str]] = {
    "family": lambda plan: plan.family,
    "precision": lambda plan: plan.precision,
    "optimizer": lambda plan: plan.optimizer,
    "b": lambda plan: str(plan.micro_batch),
    "N": lambda plan: str(plan.accumulation_steps),
    "batch": lambda plan: batch_text(plan),
    "checkpointing": lambda plan: plan.checkpointing,
    "attention": lambda plan: plan.attention,
    "sharding": lambda plan: plan.sharding,
    "peak": lambda plan: format_bytes(plan.peak_bytes),
    "source": lambda plan: plan.labels["peak_bytes"],
    "needs": lambda plan: format_bytes(plan.needed_bytes),
    "fits": lambda plan: "yes" if plan.fits else "no",
    "binding": lambda plan: plan.binding,
    "time/sample": lambda plan: time_text(plan),
}
LESS_NEEDED = ("needs", "batch", "attention", "source", "sharding", "optimizer", "time/sample")
"""What a narrow terminal does without, in this order."""
PHASES = ("forward", "backward", "optimizer")


def time_text(plan: Plan) -> str:
    """`12-27 ms` where the card's speed is known, `1.3x` over the fastest where it is not."""
    if plan.time_per_sample_range_s is not None:
        low, high = plan.time_per_sample_range_s
        return f"{format_seconds(low)}..{format_seconds(high)}"
    return "unknown" if plan.relative_time is None else f"{plan.relative_time:.2f}x fastest"


def batch_text(plan: Plan) -> str:
    """b N D, and by how much it misses the batch asked for."""
    deviation = f" ({plan.batch_deviation:+d})" if plan.batch_deviation else ""
    return f"{plan.batch}{deviation}"


def cells(plans: Sequence[Plan], width: int | None = None) -> list[list[str]]:
    """Header and rows, without columns that do not go into `width` characters."""
    names = list(COLUMNS)
    while True:
        rows = [names, *([COLUMNS[name](plan) for name in names] for plan in plans)]
        wide = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
        spare = next((name for name in LESS_NEEDED if name in names), None)
        if width is None or wide <= width or spare is None:
            return rows
        names = [name for name in names if name != spare]


def _plain(rows: Sequence[Sequence[str]], marked: int | None, out: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"{'*' if index - 1 == marked else ' '} {line}".rstrip(), file=out)


def _rich(rows: Sequence[Sequence[str]], plans: Sequence[Plan], marked: int | None) -> None:
    """The table in colours: what does not fit is dim, the recommendation bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, no_wrap=True)
    for index, (row, plan) in enumerate(zip(rows[1:], plans, strict=True)):
        style = "bold green" if index == marked else None if plan.fits else "dim"
        table.add_row(*row, style=style)
    Console().print(table)


def _time_label(shown: Sequence[Plan]) -> str:
    label = shown[0].labels.get("time_per_sample_s", "unknown") if shown else "unknown"
    rated = label == "unknown" and any(plan.relative_time is not None for plan in shown)
    return f"{label}, ratios estimated" if rated else label


def phase_text(plan: Plan) -> str:
    """`forward 9.1 GB, backward 14.2 GB, optimizer 12.0 GB`."""
    known = [name for name in PHASES if name in plan.phase_bytes]
    return ", ".join(f"{name} {format_bytes(plan.phase_bytes[name])}" for name in known)


def _checkpointing(plan: Plan) -> str:
    return f"{'no' if plan.checkpointing == 'none' else plan.checkpointing} checkpointing"


def plan_text(plan: Plan) -> str:
    """A plan in words: the configuration and how its batch is made."""
    lora = " with LoRA" if plan.family == "lora" else ""
    words = [f"{plan.precision}{lora}", plan.optimizer, _checkpointing(plan)]
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
    marked = 0 if survey.recommended else None
    if out is not None and out.isatty():  # None: closed by whoever started us
        _rich(cells(shown, shutil.get_terminal_size().columns), shown, marked)
    else:
        _plain(cells(shown), marked, out)
    left = len(survey.plans) - len(shown)
    if left > 0:
        print(f"({left} more rows: --rows {len(survey.plans)})")
    label = shown[0].labels if shown else {}
    print(
        f"{survey.candidates} candidates; activations: {label.get('activations', 'unknown')};"
        f" time: {_time_label(shown)};"
        f" usable for the peak: {format_bytes(max(0.0, budget.largest_peak))}"
        f" of {format_bytes(budget.memory_bytes)} (context {format_bytes(budget.context_bytes)},"
        " and a margin of 5 % of the peak, 0.5 GB at least)"
    )
    if survey.samples_factor is None:
        print("samples to target: unknown (give --noise-scale LOW..HIGH)")
    else:
        low, high = survey.samples_factor
        print(f"samples to target: {low:.2f} to {high:.2f} times those of tiny batches (estimated)")
    if survey.soonest_accumulation is not None:
        low, high = survey.soonest_accumulation
        print(f"soonest on these devices: N about {low:.1f} to {high:.1f} (estimated)")
    chosen = survey.recommended
    if chosen is None:
        print(f"nothing fits: {survey.reason}")
        return
    print(f"recommended: {plan_text(chosen)}")
    print(f"  by phase: {phase_text(chosen)} ({chosen.labels['peak_bytes']})")
    print(f"  because: {survey.reason}")
    if chosen.family != "exact":
        print(f"  changes the learning problem: {chosen.risk}")
