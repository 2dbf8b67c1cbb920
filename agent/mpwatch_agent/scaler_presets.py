"""The table of loss scalers: one row of numbers per name, as their projects publish them.

Owns no behaviour; `scaling` reads a row. Where a project raises an exception at its floor the row
only says where that floor is: what then happens is the person's choice (`at_floor`).
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from mpwatch.vocabulary import ACTIONS_TO_COME, AT_LIMIT, INTERVAL_UNITS


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The numbers of one loss scaler.

    `growth_interval` counts clean `interval_unit`s (windows, micro_batches over all ranks, or
    samples) before the scale grows. `hysteresis` is how many overflows it takes to lower the
    scale; spent ones come back when the scale grows or, if `consecutive`, with each clean window.
    `floor` is the smallest scale; where `keeps_off_floor`, a step down that would end at or below
    it is not taken at all instead of ending on it. `guided`: the scale also follows the largest
    gradient (`histogram`).
    """

    name: str
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    interval_unit: str = "windows"
    hysteresis: int = 1
    consecutive: bool = False
    floor: float | None = None
    keeps_off_floor: bool = False
    ceiling: float | None = None
    at_floor: str = "warn"
    at_ceiling: str = "warn"
    guided: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("at_floor", "at_ceiling"):
            word = getattr(self, name)
            if word not in AT_LIMIT:
                raise ValueError(f"{name} is {word!r}; allowed are {', '.join(AT_LIMIT)}")
            if word in ACTIONS_TO_COME:
                raise ValueError(f"{name} {word} is not built into this version; warn and stop are")

    def _check_numbers(self) -> None:
        if self.growth_factor < 1 or not 0 < self.backoff_factor < 1:
            raise ValueError("growth_factor must be 1 or more, backoff_factor between 0 and 1")
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError("growth_interval and hysteresis must be 1 or more")
        if self.interval_unit not in INTERVAL_UNITS:
            raise ValueError(f"interval_unit is one of {', '.join(INTERVAL_UNITS)}")
        for name in ("init_scale", "floor", "ceiling"):
            value = getattr(self, name)
            if value is not None and not LOWEST <= value <= HIGHEST:
                raise ValueError(f"{name} is {value:g}; allowed are 2^-126 to 2^126")
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor {self.floor:g} is above ceiling {self.ceiling:g}")

    def expected_skip_rate(self) -> float:
        """Share of windows lost once the scale has come to rest, with gradients that stay alike.

        The scale then overflows each time it has grown: one window in `growth_interval` + 1, for
        windows as unit and factors of two. An estimate; a ceiling below that point makes it 0.
        """
        return 1.0 / (self.growth_interval + 1)


# Their reciprocals are finite and normal in fp32: no scale of ours can make a NaN out of a zero.
LOWEST: Final = 2.0**-126
HIGHEST: Final = 2.0**126

PRESETS: Final[dict[str, Policy]] = {
    row.name: row
    for row in (
        Policy(name="torch"),
        Policy(name="apex", ceiling=2.0**24),
        Policy(name="deepspeed", growth_interval=1000, hysteresis=2, floor=1.0),
        Policy(name="megatron", init_scale=2.0**32, growth_interval=1000, hysteresis=2, floor=1.0),
        Policy(
            name="fairseq",
            init_scale=2.0**7,
            growth_interval=2**14,
            interval_unit="micro_batches",
            floor=1e-4,
            keeps_off_floor=True,
        ),
        Policy(name="doubling", init_scale=2.0**10, growth_interval=1, ceiling=2.0**24),
        Policy(name="histogram", guided=True),
    )
}


def policy_of(name: str, **knobs: Any) -> Policy:
    """The preset `name` with the knobs that are not None put in.

    Raises:
        ValueError: no such preset, or a knob out of range.
    """
    if name not in PRESETS:
        raise ValueError(f"no scaler {name!r}; there are: {', '.join(PRESETS)}")
    given = {knob: value for knob, value in knobs.items() if value is not None}
    return replace(PRESETS[name], **given)
