"""Rules of thumb that people have read, reproduced as written so that they can be compared.

`simple-tree` and `param-fraction` are off by default; whoever prints them prints the honest
estimate beside, and the defect stated here.
"""

from msgspec import Struct

SIMPLE_TREE_DEFECT = (
    "counts half of Adam's states in mixed precision and scales all of memory with 1/N;"
    " a fit it reports is often none"
)
PARAM_FRACTION_DEFECT = "not meaningful: no law ties the micro-batch to the parameter count"


class TreeStep(Struct, frozen=True, kw_only=True):
    """One test of the tree."""

    accumulation: int
    needed_bytes: float
    fits: bool


class TreePlan(Struct, frozen=True, kw_only=True):
    """What the tree decides, and each test on the way."""

    precision: str | None
    """fp32, mixed, or None: no plan"""
    accumulation: int | None
    tests: tuple[TreeStep, ...]


def simple_tree(memory_bytes: float, parameters: float, max_accumulation: int = 128) -> TreePlan:
    """The article's tree with `N *= 2` in place of its endless `N = 2`, N from 1.

    fp32 if V >= 4.2 M, else mixed if V >= 2.1 M + 1.4 M / N, where M is 4 bytes per parameter.
    """
    weights = 4 * parameters
    base = 4.2 * weights
    tests = [TreeStep(accumulation=1, needed_bytes=base, fits=memory_bytes >= base)]
    if tests[0].fits:
        return TreePlan(precision="fp32", accumulation=1, tests=tuple(tests))
    accumulation = 1
    while accumulation <= max_accumulation:
        needed = 2.1 * weights + 1.4 * weights / accumulation
        fits = memory_bytes >= needed
        tests.append(TreeStep(accumulation=accumulation, needed_bytes=needed, fits=fits))
        if fits:
            return TreePlan(precision="mixed", accumulation=accumulation, tests=tuple(tests))
        accumulation *= 2
    return TreePlan(precision=None, accumulation=None, tests=tuple(tests))


def param_fraction(parameters: float) -> tuple[float, float]:
    """0.1 % and 0.5 % of the parameter count, the article's range for the micro-batch."""
    return 0.001 * parameters, 0.005 * parameters
