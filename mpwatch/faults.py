"""The grammar of `--inject`: which fault, at which steps, where.

`FAULT@step=S|A..B[,micro=J][,phase=P][,param=NAME|module=NAME][,rank=R]`. Pure; the command line
validates with it before anything starts, the agent reads the same words and acts on them.
"""

from typing import Final

import msgspec

from mpwatch.errors import UsageError
from mpwatch.vocabulary import FAULTS, FAULTS_TO_COME, PHASES

_KEYS: Final = ("step", "micro", "phase", "param", "module", "rank")
# What each fault can be aimed at beyond step and rank.
_TARGETS: Final[dict[str, frozenset[str]]] = {
    "overflow": frozenset({"micro", "param"}),
    "nan": frozenset({"micro", "module"}),
    "oom": frozenset({"micro", "phase"}),
    "slow": frozenset({"phase"}),
    "kill": frozenset(),
    "hub-kill": frozenset(),
    "hub-stop": frozenset(),
    "disk-full": frozenset(),
}
MAX_STEP: Final = 10**9


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One `--inject`: fires once for each step in `first_step`..`last_step`.

    `micro` counts micro-batches of the window from 0; None means the last one. `param` is the
    name of a parameter (None: the last one of the last group), `module` that of a module.
    """

    name: str
    first_step: int
    last_step: int
    micro: int | None = None
    phase: str | None = None
    param: str | None = None
    module: str | None = None
    rank: int | None = None

    def names_step(self, step: int) -> bool:
        """Whether this fault fires at `step`."""
        return self.first_step <= step <= self.last_step


def parse(text: str) -> Fault:
    """Read one fault.

    Raises:
        UsageError: with what is wrong and what would be right.

    Example:
        >>> parse("overflow@step=5,micro=2").micro
        2
    """
    name, at, rest = text.partition("@")
    if name not in FAULTS:
        raise UsageError(f"--inject {text!r}: no fault {name!r}; there are: {', '.join(FAULTS)}")
    if name in FAULTS_TO_COME:
        raise UsageError(f"--inject {text!r}: {name} is not built in this version yet")
    if not at:
        raise UsageError(f"--inject {text!r}: say when, for example {name}@step=5")
    values = _split(text, rest)
    if "step" not in values:
        raise UsageError(f"--inject {text!r}: step=S or step=A..B is missing")
    _check_targets(text, name, values)
    first, last = _steps(text, values["step"])
    phase = values.get("phase")
    if phase is not None and phase not in PHASES:
        raise UsageError(f"--inject {text!r}: no phase {phase!r}; there are: {', '.join(PHASES)}")
    return Fault(
        name=name,
        first_step=first,
        last_step=last,
        micro=_number(text, "micro", values.get("micro"), 0),
        phase=phase,
        param=values.get("param"),
        module=values.get("module"),
        rank=_number(text, "rank", values.get("rank"), 0),
    )


def text_of(fault: Fault) -> str:
    """The words of `fault`, as `parse` reads them.

    Example:
        >>> text_of(parse("nan@step=2..4,module=head"))
        'nan@step=2..4,module=head'
    """
    steps = f"{fault.first_step}"
    if fault.last_step != fault.first_step:
        steps += f"..{fault.last_step}"
    values = ((key, getattr(fault, key)) for key in _KEYS[1:])
    named = "".join(f",{key}={value}" for key, value in values if value is not None)
    return f"{fault.name}@step={steps}{named}"


def _split(text: str, rest: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals or not value:
            raise UsageError(
                f"--inject {text!r}: cannot read {part!r}; use {', '.join(k + '=' for k in _KEYS)}"
            )
        if key in values:
            raise UsageError(f"--inject {text!r}: {key}= is given twice")
        values[key] = value
    return values


def _check_targets(text: str, name: str, values: dict[str, str]) -> None:
    for key in values.keys() - {"step", "rank"} - _TARGETS[name]:
        raise UsageError(f"--inject {text!r}: {name} takes no {key}=")


def _steps(text: str, value: str) -> tuple[int, int]:
    first, dots, last = value.partition("..")
    start = _number(text, "step", first, 1)
    end = _number(text, "step", last, 1) if dots else start
    assert start is not None
    assert end is not None
    if end < start:
        raise UsageError(f"--inject {text!r}: step={value} runs backwards")
    return start, end


def _number(text: str, key: str, value: str | None, least: int) -> int | None:
    if value is None:
        return None
    readable = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_STEP))
    if not readable or not least <= int(value) <= MAX_STEP:
        raise UsageError(f"--inject {text!r}: {key}={value} is no number from {least}")
    return int(value)
