"""Resolves the options of a run: flag > environment > configuration file > default.

Every value keeps its origin, so that `mpwatch config` can say where it came from. A file that
cannot be used is an error: a silently ignored setting would be worse.
"""

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mpwatch.cli.options import BY_NAME, OPTIONS, checked
from mpwatch.errors import UsageError
from mpwatch.vocabulary import clean_text

OWN_FILE: Final = "mpwatch.toml"
PROJECT_FILE: Final = "pyproject.toml"

# The fields of a plan (`mpwatch plan --emit`). The first group asks for something. The precision is
# taken for `--precision`; the rest cannot be done from outside, or only by somebody who knows the
# script, so each is named and the run goes on as the script has it.
PLAN_REQUESTS: Final = (
    "precision",
    "optimizer",
    "micro_batch",
    "accumulation_steps",
    "checkpointing",
    "attention",
    "sharding",
    "devices",
)
PLAN_FACTS: Final = (
    "family",
    "batch",
    "batch_deviation",
    "peak_bytes",
    "needed_bytes",
    "estimated_peak_bytes",
    "fits",
    "binding",
    "phase_bytes",
    "terms_bytes",
    "time_per_sample_s",
    "time_per_sample_range_s",
    "relative_time",
    "risk",
    "label",
    "labels",
)


PREFIX: Final = "MPWATCH_"
# Variables that are no options: read before there are any, and by `watch()`.
OTHER_VARIABLES: Final = frozenset({"MPWATCH_DISABLED", "MPWATCH_SERVE"})
VARIABLES_NAMED: Final = 3


class Setting(NamedTuple):
    """A value and where it came from."""

    value: Any
    origin: str


class Configuration(NamedTuple):
    """All options by name, and the fields of a plan that a configuration file brought."""

    settings: dict[str, Setting]
    plan: dict[str, Any]
    plan_file: str

    def value(self, name: str) -> Any:
        """The value of one option."""
        return self.settings[name].value

    def is_default(self, name: str) -> bool:
        """Whether nobody chose this value."""
        return self.settings[name].origin == "default"


def resolve(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    directory: str,
    file: str | None = None,
) -> Configuration:
    """Settle every option; `flags` holds those given (others None), `file` is `--config`.

    Raises:
        UsageError: a bad value, an unknown key, a file that cannot be read.
    """
    file_values, file_origin, plan = _read(file, directory)
    settings = {}
    for option in OPTIONS:
        given = flags.get(option.name)
        word = environment.get(option.variable)
        if given is not None:
            value = checked(option, given, option.flag)
            settings[option.name] = Setting(value, f"flag {option.flag}")
        elif word:
            value = checked(option, word, f"environment {option.variable}")
            settings[option.name] = Setting(value, f"environment {option.variable}")
        elif option.name in file_values:
            value = checked(option, file_values[option.name], file_origin)
            settings[option.name] = Setting(value, file_origin)
        elif option.name == "precision" and plan_asks_precision(plan):
            origin = f"{file_origin} [plan]"
            settings[option.name] = Setting(checked(option, plan["precision"], origin), origin)
        else:
            settings[option.name] = Setting(option.default, "default")
    return Configuration(settings, plan, file_origin)


def plan_asks_precision(plan: Mapping[str, Any]) -> bool:
    """Whether a plan's precision is one that the script may be run in.

    O0 is the script's own, and O2 is not what a plan with LoRA is without the adapters.
    """
    return plan.get("precision", "O0") != "O0" and plan.get("family") != "lora"


def _read(file: str | None, directory: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Values, their origin, and the plan, of the file given or the one found."""
    if file is not None:
        return _options_of(_parsed(file), file)
    own = os.path.join(directory, OWN_FILE)
    if os.path.exists(own):
        return _options_of(_parsed(own), OWN_FILE)
    project = os.path.join(directory, PROJECT_FILE)
    if _mentions_us(project):
        tool = _parsed(project).get("tool", {})
        table = tool.get("mpwatch", {}) if isinstance(tool, dict) else {}
        return _options_of(table, f"{PROJECT_FILE} [tool.mpwatch]")
    return {}, "", {}


def _mentions_us(path: str) -> bool:
    """Whether the project's file has anything for us: the parser is loaded only then.

    A pyproject.toml that is broken elsewhere is not ours to complain about.
    """
    try:
        with open(path, "rb") as file:
            return b"mpwatch" in file.read()
    except OSError:
        return False


def _parsed(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def _options_of(table: object, origin: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    if not isinstance(table, dict):
        raise UsageError(f"{origin}: mpwatch is no table")
    values = dict(table)
    plan = values.pop("plan", {})
    if not isinstance(plan, dict):
        raise UsageError(f"{origin}: plan is no table")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values.keys() - BY_NAME.keys():
        raise UsageError(f"{origin}: unknown key {name!r}; there are: {', '.join(BY_NAME)}, plan")
    for name in plan.keys() - {*PLAN_REQUESTS, *PLAN_FACTS}:
        raise UsageError(f"{origin}: [plan] has an unknown key {name!r}")
    for name, value in values.items():
        checked(BY_NAME[name], value, origin)
    return values, origin, plan


def unknown_variables(environment: Mapping[str, str]) -> str | None:
    """What to say of variables that look like ours and are read by nobody; None without any.

    Values stay unsaid: they may be secrets.
    """
    known = {option.variable for option in OPTIONS} | OTHER_VARIABLES
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if not unknown:
        return None
    import difflib

    endings = [name.removeprefix(PREFIX) for name in known]
    named = []
    for name in unknown[:VARIABLES_NAMED]:
        ending = name.removeprefix(PREFIX).upper()
        near = difflib.get_close_matches(ending, endings, n=1)
        meant = f" (is {PREFIX}{near[0]} meant?)" if near else ""
        named.append(f"{clean_text(name, 60)}{meant}")
    named += ["..."] if len(unknown) > len(named) else []
    one = len(unknown) == 1
    return (
        f"environment: {', '.join(named)} {'is no variable' if one else 'are no variables'} of"
        f" mpwatch and {'does' if one else 'do'} nothing; see: mpwatch config"
    )


def runs_directory(flag: str | None) -> str:
    """Where verbs that read look for runs: the same place that `run` would write to."""
    return str(resolve({"runs_dir": flag}, os.environ, ".").value("runs_dir"))
