"""Learning-rate rules for a batch that is kappa times the recipe's: pure numbers.

Every factor is relative to the recipe's own batch, never to the one before, so that changes of K
do not compound (MATH of each rule: Goyal 2017, Hoffer 2017, Johnson 2020, McCandlish 2018).
"""

from mpwatch.vocabulary import LR_RULES


def factor(rule: str, kappa: float, batch: float | None = None, phi: float | None = None) -> float:
    """What to multiply the learning rate of the recipe with.

    Args:
        rule: one of `LR_RULES` but "auto".
        kappa: the batch over the recipe's batch.
        batch: the recipe's batch in samples, for "adascale".
        phi: the gradient noise scale in samples, for "adascale".

    Raises:
        ValueError: no such rule, or what it needs is missing.
    """
    if rule not in LR_RULES or rule == "auto":
        raise ValueError(f"no learning-rate rule {rule!r}")
    if rule == "none" or kappa == 1:
        return 1.0
    if rule == "linear":
        return float(kappa)
    if rule == "sqrt":
        return float(kappa**0.5)
    if not batch or phi is None:
        raise ValueError("adascale needs the noise scale (--noise-scale) and the batch in samples")
    return (1 + phi / batch) / (1 + phi / (batch * kappa))


def resolved(rule: str, optimizer: str, phi: float | None) -> str:
    """What "auto" means: adascale with a noise scale, else sqrt for Adam's kin and linear."""
    if rule != "auto":
        return rule
    if phi is not None:
        return "adascale"
    adaptive = ("adam", "lamb", "rmsprop", "adagrad", "lion", "adafactor")
    return "sqrt" if any(name in optimizer.lower() for name in adaptive) else "linear"


class Ramp:
    """A factor that moves linearly to each new value over `length` updates."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._from = self._now = self._to = 1.0
        self._taken = 0

    def start_at(self, value: float) -> None:
        """Be at `value` at once (from the start there is nothing to ramp from)."""
        self._from = self._now = self._to = value

    def next(self, target: float) -> float:
        """The factor for the next update, on its way to `target`."""
        if target != self._to:
            self._from, self._to, self._taken = self._now, target, 0
        self._taken += 1
        share = 1.0 if self._taken >= self._length else self._taken / self._length
        self._now = self._from + (self._to - self._from) * share
        return self._now
