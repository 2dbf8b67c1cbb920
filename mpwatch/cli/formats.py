"""How numbers, times and tables look in the plain text of verbs, and values in `--json`. Pure."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any, Final

from mpwatch.vocabulary import scale_words

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def to_json(value: object) -> str:
    """JSON on one line; numbers that JSON does not have become "inf", "-inf" and "nan"."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def table(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Columns two spaces apart, those in `numbers` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if position in numbers else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def moment(seconds: float | None) -> str:
    """A time since the epoch in local time."""
    if not seconds:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        # A damaged or hostile file: no date, and no reason to hide the other runs.
        return "-"


def number(value: float | None) -> str:
    """Four significant digits; "-" for what is not known."""
    return "-" if value is None else f"{value:.4g}"


def scale(value: float | None) -> str:
    """A loss scale, a power of two as such; "-" for what is not known."""
    return "-" if value is None else scale_words(value)


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float | None) -> str:
    """Bytes in powers of 1000."""
    if count is None:
        return "-"
    for unit in _UNITS:
        if abs(count) < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.4g} {unit}"
