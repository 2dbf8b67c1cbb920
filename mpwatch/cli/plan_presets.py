"""A published rule of thumb as it stands, its defect, and the honest estimate beside it."""

from mpwatch.cli.plan_table import plan_text
from mpwatch.planner.model import Model
from mpwatch.planner.plans import Budget
from mpwatch.planner.presets import (
    PARAM_FRACTION_DEFECT,
    SIMPLE_TREE_DEFECT,
    param_fraction,
    simple_tree,
)
from mpwatch.planner.survey import Survey
from mpwatch.planner.units import format_bytes


def preset_lines(name: str, budget: Budget, model: Model, survey: Survey) -> list[str]:
    """What the rule says, line by line."""
    best = survey.recommended
    honest = f"{plan_text(best)}: {format_bytes(best.peak_bytes)}" if best else survey.reason
    if name == "param-fraction":
        low, high = param_fraction(model.parameters)
        lines = [f"param-fraction: micro-batch of {low:.3g} to {high:.3g} samples"]
        lines.append(f"  defect: {PARAM_FRACTION_DEFECT}")
    else:
        lines = _tree_lines(budget, model)
    return [*lines, f"  honest estimate: {honest}"]


def _tree_lines(budget: Budget, model: Model) -> list[str]:
    tree = simple_tree(budget.memory_bytes, model.parameters)
    lines = []
    for index, test in enumerate(tree.tests):
        needed = f"{'mixed' if index else 'fp32'} needs {format_bytes(test.needed_bytes)}"
        verdict = "fits" if test.fits else "too large"
        lines.append(f"simple-tree: N={test.accumulation}: {needed}, {verdict}")
    decided = f"{tree.precision}, N={tree.accumulation}" if tree.precision else "no plan"
    return [*lines, f"simple-tree: {decided}", f"  defect: {SIMPLE_TREE_DEFECT}"]
