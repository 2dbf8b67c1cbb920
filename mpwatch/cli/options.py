"""The options of a run: one table, read by `run`, `config`, configuration files and environment.

An option is a row: its name in files (`max_steps`), from which follow the flag (`--max-steps`)
and the environment variable (`MPWATCH_MAX_STEPS`). Values are checked here, whatever their origin.
"""

import argparse
import os
from typing import Any, Final, NamedTuple

from mpwatch.errors import UsageError
from mpwatch.runs import RUNS_DIRECTORY
from mpwatch.vocabulary import (
    ACTIONS_TO_COME,
    ACTIVATIONS_EVERY,
    AT_LIMIT,
    FAULTS,
    FAULTS_TO_COME,
    GRAD_NORM_EVERY,
    GRADIENTS_EVERY,
    HALF_DTYPES,
    INTERVAL_UNITS,
    LOCATE_MODES,
    LR_RULES,
    MEMORY_EVERY,
    ON_NONFINITE,
    PRECISIONS,
    SCALERS,
    SCHEDULES,
    clean_text,
    parse_interval,
    parse_precision,
)

NAME_AT_MOST: Final = 80
SCALES: Final = (2.0**-126, 2.0**126)


class Option(NamedTuple):
    """One row; `choices` are the words allowed, or those that a part of the value may be.

    `kind`: "switch", "integer", "number", "seconds", "samples", "word" (one of `choices`),
    "precision", "interval", "name", "path" or "faults" (a list); any other is a row of `CHOICES`.
    """

    name: str
    kind: str
    default: Any
    help: str
    metavar: str = ""
    least: float = 0
    most: float = 10**9
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words; those that a part of the value has where `kind` is no word."""
        return self.choices or CHOICES.get(self.kind, ())

    @property
    def description(self) -> str:
        """The line of `--help`: with every word that this version takes, and the default."""
        text = self.help
        if self.words:
            *others, last = [w for w in self.words if w not in ACTIONS_TO_COME | FAULTS_TO_COME]
            text += f": {', '.join(others)} or {last}"
        shown = self.default not in (None, False, ())
        return f"{text} (default {self.default})" if shown else text

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment."""
        return "MPWATCH_" + self.name.upper()


CHOICES: Final = {"locate": LOCATE_MODES, "schedule": SCHEDULES, "lr_rule": LR_RULES}
OPTIONS: Final = (
    Option("headless", "switch", False, "no screen: in the foreground, output untouched"),
    Option("name", "name", None, "a name for the run, to find it again", "NAME"),
    Option("runs_dir", "path", RUNS_DIRECTORY, "where run directories go", "DIR"),
    Option("no_record", "switch", False, "keep events in memory only"),
    Option("max_steps", "integer", None, "end the run after N optimizer steps", "N", 1),
    Option("accumulate", "integer", None, "windows of the script per update", "K", 1, 10**6),
    Option("schedule", "schedule", "updates", "what schedulers count", "WHAT"),
    Option("lr_rule", "lr_rule", "none", "learning rate for K", "RULE"),
    Option("lr_ramp", "integer", 0, "updates from one learning rate to the next", "N", 0, 10**6),
    Option("noise_scale", "samples", None, "gradient noise scale for --lr-rule adascale", "PHI"),
    Option("inject", "faults", (), "put a fault in, e.g. overflow@step=5 (repeatable)", "FAULT",
           choices=FAULTS),
    Option("precision", "precision", None,
           f"precision, with :{' or :'.join(HALF_DTYPES)} behind it or without", "MODE",
           choices=PRECISIONS),
    Option("scaler", "word", None, "loss scaler", "NAME", choices=SCALERS),
    Option("init_scale", "number", None, "first loss scale", "SCALE", *SCALES),
    Option("growth_interval", "interval", None, "clean windows to grow after, or 64000samples", "N",
           choices=INTERVAL_UNITS),
    Option("growth_factor", "number", None, "growth of the loss scale", "FACTOR", 1, 2.0**16),
    Option("backoff_factor", "number", None, "its fall on overflow", "FACTOR", 2.0**-16, 0.999),
    Option("hysteresis", "integer", None, "overflows that lower the loss scale", "N", 1, 1000),
    Option("consecutive_hysteresis", "switch", False, "a clean window refills hysteresis"),
    Option("scale_floor", "number", None, "smallest loss scale", "SCALE", *SCALES),
    Option("scale_ceiling", "number", None, "largest loss scale", "SCALE", *SCALES),
    Option("at_floor", "word", None, "overflows press the scale below it", "DO", choices=AT_LIMIT),
    Option("at_ceiling", "word", None, "the scale would grow above it", "DO", choices=AT_LIMIT),
    Option("on_nonfinite", "word", None, "bad gradients without a scaler", "DO",
           choices=ON_NONFINITE),
    Option("grad_norm_every", "integer", GRAD_NORM_EVERY, "steps per gradient norm", "N", 0, 10**6),
    Option("memory_every", "integer", MEMORY_EVERY, "steps per memory sample", "N", 0, 10**6),
    Option("gradients_every", "integer", GRADIENTS_EVERY, "steps per distribution", "N", 0, 10**6),
    Option("gradients_exact", "switch", False, "count every gradient, not a sample of them"),
    Option("activations_every", "integer", ACTIVATIONS_EVERY, "steps per headroom", "N", 0, 10**6),
    Option("locate", "locate", "auto", "watch micro-batches", "MODE"),
    Option("dump_bad_batch", "switch", False, "keep the batch of an overflow in crash/"),
    Option("replay_batch", "path", None, "run a kept batch through the model, traced", "DIR"),
    Option("stall_after", "seconds", 30.0, "silence that counts as a stall", "SECONDS", 1),
    Option("grace", "seconds", 25.0, "time between SIGTERM and SIGKILL of a stop", "SECONDS", 0),
    Option("die_with_keeper", "switch", False, "kill the script if its keeper is killed"),
)  # fmt: skip
SCALER_KNOBS: Final = (
    "init_scale",
    "growth_interval",
    "growth_factor",
    "backoff_factor",
    "hysteresis",
    "consecutive_hysteresis",
    "scale_floor",
    "scale_ceiling",
    "at_floor",
    "at_ceiling",
)
BY_NAME: Final = {option.name: option for option in OPTIONS}
BY_FLAG: Final = {option.flag: option for option in OPTIONS}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each option; values stay words, absent is None."""
    for option in OPTIONS:
        text = option.description.replace("%", "%%")
        if option.kind == "switch":
            parser.add_argument(option.flag, action="store_const", const=True, help=text)
        else:
            action = "append" if option.kind == "faults" else "store"
            parser.add_argument(option.flag, action=action, metavar=option.metavar, help=text)


def checked(option: Option, value: object, origin: str) -> Any:
    """The value of `option` in its own type.

    Raises:
        UsageError: quoting `origin`, the value given and what is allowed.
    """
    where = f"{origin}: " if origin == option.flag else f"{origin}: {option.name}: "
    if option.kind == "switch":
        return _switch(where, value)
    if option.kind in ("integer", "number", "seconds", "samples"):
        return _number(option, where, value)
    if option.kind == "faults":
        return _faults(where, value)
    if option.kind == "interval" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    choices = CHOICES.get(option.kind)
    if choices is not None and value not in choices:
        raise UsageError(f"{where}{value!r} is none of {', '.join(choices)}")
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{where}{value!r} is no text")
    if option.kind == "word":
        return _word(option, where, value)
    if option.kind in ("precision", "interval"):
        return _parsed(option.kind, where, value)
    return _name(where, value) if option.kind == "name" else os.path.expanduser(value)


def _word(option: Option, where: str, value: str) -> str:
    if value not in option.choices:
        shown = clean_text(value, 40)
        raise UsageError(f"{where}{shown!r} is none of {', '.join(option.choices)}")
    if value in ACTIONS_TO_COME:
        raise UsageError(f"{where}{value} needs checkpoints, which this version does not have yet")
    return value


def _parsed(kind: str, where: str, value: str) -> str:
    try:
        (parse_precision if kind == "precision" else parse_interval)(value)
    except ValueError as error:
        raise UsageError(f"{where}{error}") from None
    return value


def _switch(where: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    word = value.lower() if isinstance(value, str) else ""
    if word not in words:
        raise UsageError(f"{where}{value!r} is neither true nor false")
    return words[word]


def _number(option: Option, where: str, value: object) -> int | float:
    allowed = f"from {option.least:g} to {option.most:g}"
    wanted = {"integer": "a whole number", "number": "a number"}.get(
        option.kind, f"a number of {option.kind}"
    )
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        if option.kind == "integer" and isinstance(value, float):
            raise ValueError
        number: int | float = int(value) if option.kind == "integer" else float(value)
    except ValueError:
        raise UsageError(f"{where}{value!r} is not {wanted} {allowed}") from None
    if not option.least <= number <= option.most:
        raise UsageError(f"{where}{value!r} is not {wanted} {allowed}")
    return number


def _faults(where: str, value: object) -> tuple[str, ...]:
    from mpwatch import faults

    # In the environment several faults are parted by ";", since "," belongs to the grammar.
    words = value.split(";") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where}{value!r} is no list of faults")
    for word in words:
        faults.parse(word)
    return tuple(words)


def _name(where: str, value: str) -> str:
    if value != clean_text(value) or len(value) > NAME_AT_MOST or "/" in value:
        raise UsageError(
            f"{where}{clean_text(value, 40)!r} is no name: at most 80 characters, no /"
        )
    if value in ("latest", ".", "..") or value.startswith("-"):
        raise UsageError(f"{where}{value!r} cannot be a run's name")
    return value
