"""Micro-batches that accumulators of `watch()` hold and have not made an update of (yet).

Owns numbers only, so that a rest is known at the end although its accumulator is gone. Told by
`Accumulator`, read by the agent's last words.
"""

import functools
import itertools
from collections.abc import Callable

_serials = itertools.count()
_open: dict[int, int] = {}


def another() -> Callable[[int], None]:
    """What a new accumulator tells how many micro-batches it holds."""
    return functools.partial(_hold, next(_serials))


def _hold(serial: int, micro_batches: int) -> None:
    if micro_batches:
        _open[serial] = micro_batches
    else:
        _open.pop(serial, None)


def total() -> int:
    """Micro-batches held now, by all accumulators of this process."""
    return sum(_open.values())
