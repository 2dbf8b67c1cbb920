"""What may be asked of a running job: one frozen Struct per command, named in the imperative.

Each request carries an id and gets exactly one outcome event. Person and controller use the same
path. Parsing of the words a person types stands here too, so that `ctl`, the TUI and tests agree.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from mpwatch.errors import UsageError
from mpwatch.vocabulary import SCALERS, parse_interval

MAX_MULTIPLIER: Final = 1_000_000


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="command",
    tag=_snake,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all commands; `command` on the wire is the class name in snake_case."""


class Pause(Command, frozen=True, kw_only=True):
    """Wait at the next boundary. Ends by itself 60 s after the hub is gone unless `stay`."""

    stay: bool = False


class Unpause(Command, frozen=True, kw_only=True):
    """Go on after a pause."""


class StopAtBoundary(Command, frozen=True, kw_only=True):
    """End the script at the next boundary, with exit code 0."""


class SetSampling(Command, frozen=True, kw_only=True):
    """Change how often the costlier measurements are taken, in steps; 0 switches one off.

    `gradients_exact` counts every gradient instead of a sample of them, from the next one on.
    """

    grad_norm_every: int | None = None
    memory_every: int | None = None
    gradients_every: int | None = None
    activations_every: int | None = None
    gradients_exact: bool | None = None

    def __post_init__(self) -> None:
        fields = ("grad_norm_every", "memory_every", "gradients_every", "activations_every")
        if all(getattr(self, name) is None for name in (*fields, "gradients_exact")):
            raise ValueError(
                f"set_sampling needs one of {', '.join(name + '=N' for name in fields)} (steps)"
                " or gradients_exact=true"
            )
        for name in fields:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1_000_000:
                raise ValueError(f"{name} is {value}; allowed are 0 (off) to 1000000 steps")


class SetScale(Command, frozen=True, kw_only=True):
    """Set the loss scale; its policy goes on from there."""

    scale: float

    def __post_init__(self) -> None:
        if not 2.0**-126 <= self.scale <= 2.0**126:
            raise ValueError(f"scale is {self.scale:g}; allowed are 2^-126 to 2^126")


class SetScalerPolicy(Command, frozen=True, kw_only=True):
    """Have the loss scale follow a preset, with the knobs that are given, from now on."""

    policy: str
    growth_interval: str | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    hysteresis: int | None = None
    scale_floor: float | None = None
    scale_ceiling: float | None = None
    at_floor: str | None = None
    at_ceiling: str | None = None

    def __post_init__(self) -> None:
        if self.policy not in SCALERS:
            raise ValueError(f"no scaler {self.policy!r}; there are: {', '.join(SCALERS)}")
        if self.growth_interval is not None:
            parse_interval(self.growth_interval)


class SetAccumulation(Command, frozen=True, kw_only=True):
    """Let `multiplier` windows of the script make one update; 1 leaves the script as it is.

    Takes effect at the next training forward after a step, once two windows were watched.
    """

    multiplier: int

    def __post_init__(self) -> None:
        if not 1 <= self.multiplier <= MAX_MULTIPLIER:
            raise ValueError(
                f"multiplier is {self.multiplier}; allowed are 1 (off) to {MAX_MULTIPLIER}"
                " windows of the script"
            )


class LocateOverflow(Command, frozen=True, kw_only=True):
    """Watch every gradient after every backward for the next `steps` steps."""

    steps: int = 200

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1_000_000:
            raise ValueError(f"steps is {self.steps}; allowed are 1 to 1000000")


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command on its way: `id` is unique per request, `by` is "person" or "controller"."""

    id: str
    command: msgspec.Raw
    by: str = "person"


COMMANDS: Final[dict[str, type[Command]]] = {
    str(cls.__struct_config__.tag): cls for cls in Command.__subclasses__()
}
_UNION = (
    Pause
    | Unpause
    | StopAtBoundary
    | SetSampling
    | LocateOverflow
    | SetAccumulation
    | SetScale
    | SetScalerPolicy
)
_DECODER: Final = msgspec.msgpack.Decoder(_UNION)


def name_of(command: Command) -> str:
    """The command's word, as on the wire and on the command line."""
    return str(command.__struct_config__.tag)


def arguments_of(command: Command) -> dict[str, object]:
    """The command's fields that differ from their defaults."""
    fields: dict[str, object] = msgspec.to_builtins(command)
    fields.pop("command", None)
    return fields


def decode(raw: bytes | msgspec.Raw) -> Command:
    """Decode one command.

    Raises:
        msgspec.ValidationError: unknown command, unknown or bad field (the message quotes it).
    """
    return _DECODER.decode(raw)


def parse(name: str, words: Sequence[str]) -> Command:
    """Build a command from the words of a person: values in order, or `field=value`.

    Raises:
        UsageError: unknown command or field, or a value out of range.

    Example:
        >>> parse("set_sampling", ["grad_norm_every=10"])
        SetSampling(grad_norm_every=10, memory_every=None)
    """
    known = COMMANDS.get(name.replace("-", "_"))
    if known is None:
        raise UsageError(f"no command {name!r}; there are: {', '.join(sorted(COMMANDS))}")
    fields = known.__struct_fields__
    values: dict[str, str] = {}
    for position, word in enumerate(words):
        field, separator, value = word.partition("=")
        if not separator:
            if position >= len(fields):
                raise UsageError(f"{name} takes {len(fields)} values at most, got {word!r}")
            field, value = fields[position], word
        field = field.replace("-", "_")
        if field not in fields:
            raise UsageError(f"{name} has no field {field!r}; it has: {', '.join(fields)}")
        values[field] = value
    try:
        return msgspec.convert(values, type=known, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        text = str(error)
        if isinstance(error, msgspec.ValidationError) and "`" in text:
            wanted = " ".join(
                f"{field.name}={_in_words(field.type)}" for field in msgspec.structs.fields(known)
            )
            given = " ".join(words)
            text = f"takes {wanted}; given: {given}" if given else f"needs {wanted}"
            raise UsageError(f"{name} {text}") from None
        raise UsageError(text if text.startswith(name) else f"{name}: {text}") from None


def _in_words(kind: object) -> str:
    """A field's type as a person writes its values."""
    text = str(kind)
    for name, words in (("int", "WHOLE-NUMBER"), ("float", "NUMBER"), ("bool", "true|false")):
        if name in text:
            return words
    return "TEXT"
