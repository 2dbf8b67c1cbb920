"""Numbers people write: `16GB`, `24GiB`, `1.3B`, `400..600`; and how bytes are printed.

GB is 10^9 bytes and GiB is 2^30, everywhere in mpwatch. Pure functions; a text that cannot be
read raises UsageError with the text quoted. Called by the `plan` verb and the pictures.
"""

import math
import re

from mpwatch.errors import UsageError

BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
LARGEST_BYTES = 10**18
LARGEST_COUNT = 10**15
_NUMBER = re.compile(
    r"^([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)$", re.IGNORECASE | re.ASCII
)


def _quantity(text: str, units: dict[str, int], what: str, example: str, largest: int) -> int:
    """Read a positive number with a unit; the message quotes what was given."""
    match = _NUMBER.match(text.strip())
    if match is None or match.group(2).lower() not in units:
        raise UsageError(f"{what} {text!r} is not understood: write it like {example}")
    value = float(match.group(1)) * units[match.group(2).lower()]
    if not 1 <= value <= largest:
        raise UsageError(f"{what} {text!r} is out of range: allowed is 1 to {largest:.0e}")
    return round(value)


def parse_bytes(text: str, what: str = "memory size") -> int:
    """Bytes of `16GB` (10^9), `24GiB` (2^30), `512MiB`. Raises UsageError."""
    if text.strip().replace(".", "", 1).isdigit():
        raise UsageError(f"{what} {text!r} has no unit: write it like 16GB (10^9) or 24GiB (2^30)")
    return _quantity(text, BYTE_UNITS, what, "16GB (10^9 bytes) or 24GiB (2^30)", LARGEST_BYTES)


def parse_count(text: str, what: str = "count") -> int:
    """A whole number like `1.3B`, `350M`, `7e9` or `50304`. Raises UsageError."""
    return _quantity(text, COUNT_UNITS, what, "350M, 1.3B or 7e9", LARGEST_COUNT)


def parse_interval(text: str, what: str) -> tuple[float, float]:
    """A positive number or `low..high`. Raises UsageError."""
    low, dots, high = text.partition("..")
    try:
        ends = (float(low), float(high) if dots else float(low))
    except ValueError as error:
        message = f"{what} {text!r} is not understood: write 465 or 300..600"
        raise UsageError(message) from error
    if not (0 < ends[0] <= ends[1] and math.isfinite(ends[1])):
        raise UsageError(f"{what} {text!r} must be positive and in rising order")
    return ends


def format_bytes(value: float, more: int = 0) -> str:
    """Three significant figures in decimal units, or `more`: `14.6 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            scaled = value / size
            digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:.{digits + more}f} {unit}"
    return f"{value:.0f} B"


def format_apart(first: float, second: float) -> tuple[str, str]:
    """Two sizes with as many figures as it takes to see which is larger."""
    for more in range(6):
        found = format_bytes(first, more), format_bytes(second, more)
        if found[0] != found[1]:
            break
    return found


def format_count(value: float) -> str:
    """`1.42B`, `3.72M`: counts of parameters, in short-scale letters as the field writes them."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def format_seconds(value: float) -> str:
    """`1.24 s`, `83 ms`, `210 us`."""
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"
