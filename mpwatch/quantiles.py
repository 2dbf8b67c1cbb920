"""A histogram with logarithmic bins: medians of any number of durations in bounded memory.

Bins grow by 1 %, and a bin is read as its geometric middle, so a median is within
sqrt(1.01) - 1 < 0.5 % of the true one. From 1 ns to 10^6 s there are 3473 bins at most.
"""

import math
from typing import Final

import msgspec

_GROWTH: Final = math.log(1.01)
_BINS_PER_E: Final = 1.0 / _GROWTH
_SMALLEST: Final = 1e-9
_LARGEST: Final = 1e6
_LAST_BIN: Final = math.floor(math.log(_LARGEST) * _BINS_PER_E)
_ZERO_BIN: Final = -10_000  # durations that a clock could not tell from nothing


class LogHistogram(msgspec.Struct):
    """Counts per bin, and the exact total."""

    bins: dict[int, int] = msgspec.field(default_factory=dict)
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a finite duration that is not negative, as often as it is given."""
        if _SMALLEST <= seconds <= _LARGEST:
            index = math.floor(math.log(seconds) * _BINS_PER_E)
        else:
            index = _ZERO_BIN if seconds < _SMALLEST else _LAST_BIN
        bins = self.bins
        if index in bins:
            bins[index] += times
        else:
            bins[index] = times
        self.count += times
        self.total += seconds * times

    def copy(self) -> "LogHistogram":
        """Another one with the same counts."""
        return LogHistogram(dict(self.bins), self.count, self.total)

    def median(self) -> float | None:
        """The median within 0.5 %; of an even number, the mean of the middle two."""
        if not self.count:
            return None
        lower, upper = (self.count + 1) // 2, self.count // 2 + 1
        first: float | None = None
        seen = 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if first is None and seen >= lower:
                first = _middle(index)
            if first is not None and seen >= upper:
                return (first + _middle(index)) / 2
        return first


def _middle(index: int) -> float:
    return 0.0 if index == _ZERO_BIN else math.exp((index + 0.5) * _GROWTH)
