"""How numbers look on the screen: short, steady in width, "-" for what is not known. Pure."""

from typing import Final

from mpwatch.vocabulary import scale_words

_BYTES: Final = ("B", "kB", "MB", "GB", "TB")


def number(value: float | None) -> str:
    """Four significant digits."""
    return "-" if value is None else f"{value:.4g}"


def scale(value: float | None) -> str:
    """A loss scale: powers of two stay readable as such."""
    return "-" if value is None else scale_words(value)


def seconds(value: float | None) -> str:
    """A short time in the unit that fits."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    if value < 1.0:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 120 else elapsed(value)


def elapsed(value: float | None) -> str:
    """Hours, minutes and seconds as a clock shows them."""
    if value is None:
        return "-"
    minutes, rest = divmod(int(max(0.0, value)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}"
    return f"{days}d {clock}" if days else clock


def size(count: float | None) -> str:
    """Bytes in powers of 1000."""
    if count is None:
        return "-"
    for unit in _BYTES:
        if abs(count) < 1000 or unit == _BYTES[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def rate(value: float | None) -> str:
    """How often something happens per second."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
