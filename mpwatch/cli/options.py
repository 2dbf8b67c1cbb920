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
    ACTIVATIONS_EVERY,
    GRAD_NORM_EVERY,
    GRADIENTS_EVERY,
    LOCATE_MODES,
    MEMORY_EVERY,
    clean_text,
)

NAME_AT_MOST: Final = 80


class Option(NamedTuple):
    """One row. `kind`: "switch", "integer", "seconds", "name", "path", "locate" or "faults".

    A "locate" is one of `LOCATE_MODES`, "faults" is a list.
    """

    name: str
    kind: str
    default: Any
    help: str
    metavar: str = ""
    least: float = 0
    most: float = 10**9

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment."""
        return "MPWATCH_" + self.name.upper()


OPTIONS: Final = (
    Option("headless", "switch", False, "no screen: in the foreground, output untouched"),
    Option("name", "name", None, "a name for the run, to find it again", "NAME"),
    Option("runs_dir", "path", RUNS_DIRECTORY, "where run directories go", "DIR"),
    Option("no_record", "switch", False, "keep events in memory only"),
    Option("max_steps", "integer", None, "end the run after N optimizer steps", "N", 1),
    Option("inject", "faults", (), "put a fault in, e.g. overflow@step=5 (repeatable)", "FAULT"),
    Option("grad_norm_every", "integer", GRAD_NORM_EVERY, "steps per gradient norm", "N", 0, 10**6),
    Option("memory_every", "integer", MEMORY_EVERY, "steps per memory sample", "N", 0, 10**6),
    Option("gradients_every", "integer", GRADIENTS_EVERY, "steps per distribution", "N", 0, 10**6),
    Option("gradients_exact", "switch", False, "count every gradient, not a sample of them"),
    Option("activations_every", "integer", ACTIVATIONS_EVERY, "steps per headroom", "N", 0, 10**6),
    Option("locate", "locate", "auto", "watch micro-batches: auto, full or off", "MODE"),
    Option("dump_bad_batch", "switch", False, "keep the batch of an overflow in crash/"),
    Option("replay_batch", "path", None, "run a kept batch through the model, traced", "DIR"),
    Option("stall_after", "seconds", 30.0, "silence that counts as a stall", "SECONDS", 1),
    Option("grace", "seconds", 25.0, "time between SIGTERM and SIGKILL of a stop", "SECONDS", 0),
    Option("die_with_keeper", "switch", False, "kill the script if its keeper is killed"),
)  # fmt: skip
BY_NAME: Final = {option.name: option for option in OPTIONS}
BY_FLAG: Final = {option.flag: option for option in OPTIONS}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each option; values stay words, absent is None."""
    for option in OPTIONS:
        if option.kind == "switch":
            parser.add_argument(option.flag, action="store_const", const=True, help=option.help)
        else:
            action = "append" if option.kind == "faults" else "store"
            parser.add_argument(
                option.flag, action=action, metavar=option.metavar, help=option.help
            )


def checked(option: Option, value: object, origin: str) -> Any:
    """The value of `option` in its own type.

    Raises:
        UsageError: quoting `origin`, the value given and what is allowed.
    """
    where = f"{origin}: " if origin == option.flag else f"{origin}: {option.name}: "
    if option.kind == "switch":
        return _switch(where, value)
    if option.kind in ("integer", "seconds"):
        return _number(option, where, value)
    if option.kind == "faults":
        return _faults(where, value)
    if option.kind == "locate" and value not in LOCATE_MODES:
        raise UsageError(f"{where}{value!r} is none of {', '.join(LOCATE_MODES)}")
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{where}{value!r} is no text")
    return _name(where, value) if option.kind == "name" else os.path.expanduser(value)


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
    wanted = "a whole number" if option.kind == "integer" else "a number of seconds"
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
