"""Draws a survey as text: memory against time, and the space of precision, N and sharding.

Plain ASCII, so that it can be pasted anywhere; pictures are in plan_picture.
"""

import math
from collections.abc import Sequence

from mpwatch.planner.plans import Budget, Plan
from mpwatch.planner.space import ACCUMULATIONS, Cell
from mpwatch.planner.survey import Survey
from mpwatch.planner.units import format_bytes

WIDTH, HEIGHT = 64, 16
LETTERS = {"exact": "e", "8bit": "8", "lora": "l", "pure_half": "h"}


def _place(value: float, low: float, high: float, cells: int) -> int:
    """The cell of a value on a logarithmic axis."""
    if high <= low:
        return 0
    share = math.log(value / low) / math.log(high / low)
    return min(cells - 1, max(0, round(share * (cells - 1))))


def scatter(survey: Survey, budget: Budget) -> list[str]:
    """Lines of a log-log scatter: a letter per family, capital on the front, `#` recommended,
    and a bar where the usable memory ends. Plans without a known time are not drawn."""
    plans = [plan for plan in survey.plans if plan.relative_time is not None]
    if not plans:
        return ["no plot: times are unknown"]
    limit = max(1.0, budget.largest_peak)
    sizes = [plan.peak_bytes for plan in plans]
    times = [plan.relative_time or 1.0 for plan in plans]
    left, right = min([*sizes, limit]), max([*sizes, limit])
    low, high = min(times), max(times)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    bar = _place(limit, left, right, WIDTH)
    for line in grid:
        line[bar] = "|"
    for plan, time in zip(plans, times, strict=True):
        row = HEIGHT - 1 - _place(time, low, high, HEIGHT)
        grid[row][_place(plan.peak_bytes, left, right, WIDTH)] = _mark(plan, survey)
    lines = [f"{high:8.2f}x |{''.join(grid[0])}"]
    lines += [f"{'':9} |{''.join(line)}" for line in grid[1:-1]]
    lines.append(f"{low:8.2f}x |{''.join(grid[-1])}")
    lines.append(f"{'time':>9} +{'-' * WIDTH}")
    ends = f"{format_bytes(left)}{format_bytes(right):>{WIDTH - len(format_bytes(left))}}"
    lines.append(f"{'peak':>9}  {ends}")
    lines.append(
        f"{'':9}  e exact, 8 8-bit states, l LoRA, h pure half; capital: on the front;"
        f" # recommended; | {format_bytes(limit)} usable"
    )
    return lines


def _mark(plan: Plan, survey: Survey) -> str:
    if plan == survey.recommended:
        return "#"
    letter = LETTERS[plan.family]
    return letter.upper() if plan in survey.front else letter


def space_lines(cells: Sequence[Cell]) -> list[str]:
    """A row for each precision and sharding, a column for each N: peak, `!` where too large."""
    columns = [n for n in ACCUMULATIONS if any(cell.accumulation == n for cell in cells)]
    by_place = {(cell.precision, cell.sharding, cell.accumulation): cell for cell in cells}
    rows = list(dict.fromkeys((cell.precision, cell.sharding) for cell in cells))
    lines = [f"{'precision':10} {'sharding':8}" + "".join(f"{f'N={n}':>11}" for n in columns)]
    for precision, sharding in rows:
        texts = []
        for n in columns:
            cell = by_place.get((precision, sharding, n))
            text = "" if cell is None else format_bytes(cell.peak_bytes)
            texts.append(f"{text + ('' if cell is None or cell.fits else '!'):>11}")
        lines.append(f"{precision:10} {sharding:8}" + "".join(texts))
    lines.append("peak of the fastest plan that fits, else the smallest peak and !; estimated")
    return lines
