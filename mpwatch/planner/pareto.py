"""Exact Pareto fronts: all objectives are minimised, duplicates are kept.

Pure Python for a few thousand points in any number of dimensions; two dimensions sort. The bulk
front over numpy arrays is in `candidates`.
"""

from collections.abc import Sequence

Point = Sequence[float]


def dominates(left: Point, right: Point) -> bool:
    """`left` is no worse everywhere and better somewhere."""
    pairs = list(zip(left, right, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def front_2d(points: Sequence[Point]) -> list[int]:
    """Indices of the undominated points, in the order of the first objective."""
    order = sorted(range(len(points)), key=lambda index: (points[index][0], points[index][1]))
    kept: list[int] = []
    best = float("inf")
    last: tuple[float, float] | None = None
    for index in order:
        x, y = points[index][0], points[index][1]
        if y < best or (x, y) == last:
            kept.append(index)
            best, last = y, (x, y)
    return kept


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the undominated points, ascending; duplicates of a kept point are kept."""
    if points and len(points[0]) == 2:
        return sorted(front_2d(points))
    order = sorted(range(len(points)), key=lambda index: tuple(points[index]))
    kept: list[int] = []
    for index in order:  # a dominating point always sorts before what it dominates
        if not any(dominates(points[other], points[index]) for other in kept):
            kept.append(index)
    return sorted(kept)


def thin(points: Sequence[Point], indices: Sequence[int], epsilon: float = 0.01) -> list[int]:
    """Drop points that another kept one matches within `epsilon` (relative) in every objective."""
    kept: list[int] = []
    for index in indices:
        close = any(
            all(
                other <= value * (1 + epsilon)
                for other, value in zip(points[kept_index], points[index], strict=True)
            )
            for kept_index in kept
        )
        if not close:
            kept.append(index)
    return kept
