"""Writes the plot, or the three-dimensional space, as PNG or SVG. The only user of matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpwatch.errors import UsageError
from mpwatch.planner.plans import Budget
from mpwatch.planner.space import Cell
from mpwatch.planner.survey import Survey

COLOURS = {"exact": "tab:blue", "8bit": "tab:orange", "lora": "tab:green", "pure_half": "tab:red"}
SUFFIXES = (".png", ".svg")


def _figure(path: str) -> Any:
    """A figure that no screen is needed for. Raises UsageError without matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"--picture {path}: write a file that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--picture needs matplotlib: pip install 'mpwatch[plan]'") from error
    return Figure(figsize=(8, 5), layout="constrained")


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def picture_survey(path: str, survey: Survey, budget: Budget) -> None:
    """Memory against time per sample, a colour for each family, the front as a line."""
    figure = _figure(path)
    axes = figure.add_subplot()
    timed = [plan for plan in survey.plans if plan.relative_time is not None]
    for family, colour in COLOURS.items():
        plans = [plan for plan in timed if plan.family == family]
        if plans:
            axes.scatter(
                [plan.peak_bytes / 1e9 for plan in plans],
                [plan.relative_time for plan in plans],
                color=colour,
                label=f"{family}: {plans[0].risk}",
            )
    front = [plan for plan in survey.front if plan.relative_time is not None]
    axes.plot(
        [plan.peak_bytes / 1e9 for plan in front],
        [plan.relative_time for plan in front],
        color="black",
        linewidth=0.8,
        label="front of what fits",
    )
    axes.axvline(max(0.0, budget.largest_peak) / 1e9, linestyle="--", color="grey")
    axes.set(
        xlabel="predicted peak in GB (dashed: usable)",
        ylabel="time per sample over the fastest (estimated)",
        yscale="log",
    )
    axes.legend(fontsize="small")
    _save(figure, path)


def picture_space(path: str, cells: Sequence[Cell]) -> None:
    """Precision, N and sharding in three dimensions; colour is the peak, crosses do not fit."""
    figure = _figure(path)
    axes = figure.add_subplot(projection="3d")
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    shardings = list(dict.fromkeys(cell.sharding for cell in cells))
    peaks = [cell.peak_bytes / 1e9 for cell in cells]
    drawn = None
    for fits, marker in ((True, "o"), (False, "x")):
        chosen = [cell for cell in cells if cell.fits == fits]
        if chosen:
            drawn = axes.scatter(
                [precisions.index(cell.precision) for cell in chosen],
                [cell.accumulation.bit_length() - 1 for cell in chosen],
                [shardings.index(cell.sharding) for cell in chosen],
                c=[cell.peak_bytes / 1e9 for cell in chosen],
                vmin=min(peaks),
                vmax=max(peaks),
                marker=marker,
                label="fits" if fits else "too large",
            )
    axes.set_xticks(range(len(precisions)), precisions)
    powers = sorted({cell.accumulation.bit_length() - 1 for cell in cells})
    axes.set_yticks(powers, [f"N={1 << power}" for power in powers])
    axes.set_zticks(range(len(shardings)), shardings)
    axes.legend()
    figure.colorbar(drawn, label="peak in GB (estimated)", shrink=0.6)
    _save(figure, path)
