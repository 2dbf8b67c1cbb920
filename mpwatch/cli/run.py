"""Supervise a training script or any command: mpwatch run [OPTIONS] SCRIPT [ARGUMENTS].

Own options come first; everything after the script belongs to it.
  mpwatch run --headless train.py --lr 0.1
  mpwatch run -m package.train --lr 0.1
  mpwatch run -- torchrun --nproc-per-node 2 train.py

In a terminal a screen shows the run, which outlives it: q leaves, mpwatch attach comes back. With
--headless, or where stdin, stdout or stderr goes elsewhere, this process becomes the supervisor.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mpwatch.cli import options
from mpwatch.cli.configuration import PLAN_REQUESTS, Configuration, resolve, unknown_variables
from mpwatch.cli.interpreter import isolating_flag
from mpwatch.errors import UsageError
from mpwatch.keeper_files import say
from mpwatch.spawning import given_environment
from mpwatch.vocabulary import clean_text

_VALUE_OPTIONS = frozenset(
    {option.flag for option in options.OPTIONS if option.kind != "switch"} | {"--config"}
)
_SWITCHES = frozenset(
    {option.flag for option in options.OPTIONS if option.kind == "switch"} | {"-h", "--help"}
)


# Options of ours that many scripts have as well, their parser often in another file.
_COMMON = frozenset({"--name"})


class Target(NamedTuple):
    """What to run. `kind`: "script", "module" or "command"; `words` begins with what it names."""

    kind: str
    words: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run; the script and its words never reach this parser."""
    parser.usage = "mpwatch run [OPTIONS] SCRIPT [ARGUMENTS] | -m MODULE ... | -- COMMAND ..."
    options.add_to(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML with options or a plan")


def own_words(words: Sequence[str]) -> tuple[list[str], Target | None]:
    """Part our own options from the script and its words.

    Raises:
        UsageError: an option we do not have stands before the script.
    """
    own: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        rest = list(words[position + 1 :])
        if word == "--":
            return own, Target("command", rest) if rest else None
        if word == "-m":
            return own, Target("module", rest) if rest else None
        if word == "-" or not word.startswith("-"):
            return own, Target("script", [word, *rest])
        name, equals, _ = word.partition("=")
        if name not in _VALUE_OPTIONS and name not in _SWITCHES:
            raise UsageError(f"no option {clean_text(name)}; see: mpwatch run --help")
        own.append(word)
        if name in _VALUE_OPTIONS and not equals and rest:
            own.append(rest[0])
            position += 1
        position += 1
    return own, None


def run(arguments: argparse.Namespace) -> int:
    """Check, prepare, and become the keeper, or watch it in a terminal; the exit code."""
    target: Target | None = getattr(arguments, "kept", None)
    if target is None:
        raise UsageError("say which script to run: mpwatch run train.py; see: mpwatch run --help")
    from mpwatch.cli import launch

    if os.environ.get("MPWATCH_DISABLED", "0") not in ("", "0"):
        return launch.execute_unwatched(_command(target), given_environment())
    _check(target)
    configuration = resolve(vars(arguments), os.environ, ".", arguments.config)
    if (unknown := unknown_variables(os.environ)) is not None:
        say(unknown)
    _tell_plan(configuration)
    _check_scaler(configuration)
    _refuse_misplaced_option(target)
    command = _command(target)
    flag = isolating_flag(command) if target.kind == "command" else None
    if flag is not None:
        say(f"python {flag} takes no agent in: this run is supervised but unwatched")
    keyboard = target.kind == "script" and target.words[0] == "-"
    return launch.launch(command, configuration, inject=flag is None, keyboard=keyboard)


def _command(target: Target) -> list[str]:
    interpreter = sys.executable or "python3"
    if target.kind == "module":
        return [interpreter, "-m", *target.words]
    if target.kind == "script" or _is_plain_script(target.words[0]):
        return [interpreter, *target.words]
    return target.words


def _is_plain_script(word: str) -> bool:
    """`mpwatch run -- train.py`: a Python file that cannot be executed by itself."""
    return word.endswith(".py") and os.path.isfile(word) and not os.access(word, os.X_OK)


def _check(target: Target) -> None:
    first = target.words[0]
    shown = clean_text(first, 200)
    if target.kind == "script" and first != "-":
        _check_script(first, shown)
    elif target.kind == "command" and shutil.which(first) is None and not _is_plain_script(first):
        raise UsageError(f"no command {shown!r} to run after --")


def _check_script(script: str, shown: str) -> None:
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise UsageError(f"{shown} is a directory; give the script in it")
    elif not os.path.exists(script):
        command = os.sep not in script and shutil.which(script) is not None
        hint = f"; to run the command: mpwatch run -- {shown} ..." if command else ""
        raise UsageError(f"no script {shown}{hint}")
    elif not os.access(script, os.R_OK):
        raise UsageError(f"cannot read {shown}: permission denied")


def _check_scaler(configuration: Configuration) -> None:
    """Refuse knobs of a scaler that nobody asked for, and limits that contradict each other."""
    given = [name for name in options.SCALER_KNOBS if not configuration.is_default(name)]
    if given and configuration.value("scaler") is None:
        flags = ", ".join(options.BY_NAME[name].flag for name in given)
        raise UsageError(f"{flags}: which scaler? add --scaler NAME (as torch has it: torch)")
    floor, ceiling = (configuration.value(name) for name in ("scale_floor", "scale_ceiling"))
    if floor is not None and ceiling is not None and floor > ceiling:
        raise UsageError(f"--scale-floor {floor:g} is above --scale-ceiling {ceiling:g}")


def _tell_plan(configuration: Configuration) -> None:
    """Say what becomes of each thing that a plan asks for; an option that was given wins."""
    plan = configuration.plan
    for name in PLAN_REQUESTS:
        if name in plan:
            asked = f"plan: {name} = {clean_text(str(plan[name]), 100)}"
            if name == "precision":
                said = _plan_precision(configuration)
            elif name == "accumulation_steps":
                said = _plan_accumulation(configuration)
            else:
                said = "is not applied by itself; the script's own stays"
            say(f"{asked} {said}")


def _plan_precision(configuration: Configuration) -> str:
    setting = configuration.settings["precision"]
    if setting.origin.endswith("[plan]"):
        return "is applied; --precision O0 leaves the script's own"
    if setting.origin != "default":
        return f"gives way to {setting.value} ({setting.origin})"
    return "is not applied by itself; the script's own stays"


def _plan_accumulation(configuration: Configuration) -> str:
    """The script's own window is known only once it runs: K is not ours to choose."""
    setting = configuration.settings["accumulate"]
    if setting.origin != "default":
        return f"gives way to K = {setting.value} ({setting.origin}), times the script's own"
    whole = clean_text(str(configuration.plan["accumulation_steps"]), 20)
    return (
        f"is not applied by itself; give --accumulate K, with K = {whole} / the micro-batches that"
        " the script gathers for a step by itself"
    )


def _refuse_misplaced_option(target: Target) -> None:
    """An option that is only ours, after the script, was meant for us and would be lost on it.

    Raises:
        UsageError: the script's text knows no such option. Names that many scripts have, and
            scripts whose text cannot be looked at, get the benefit of the doubt.
    """
    if target.kind != "script":
        return
    for word in target.words[1:]:
        flag = word.partition("=")[0]
        if word == "--":
            return
        ours = flag in options.BY_FLAG and flag not in _COMMON
        if ours and not _mentions(target, flag.lstrip("-").replace("-", "_")):
            script = clean_text(target.words[0], 100)
            raise UsageError(
                f"{flag} is mpwatch's and comes before the script: mpwatch run {flag} ... {script}"
                f" (if it is the script's: mpwatch run -- python {script} ...)"
            )


def _mentions(target: Target, name: str) -> bool:
    """Whether the script's text knows an option `name`, written with either dash."""
    try:
        with open(target.words[0], "rb") as file:
            text = file.read(1 << 20).replace(b"-", b"_")
    except OSError:
        return True
    return name.encode() in text
