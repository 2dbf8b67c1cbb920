"""Starts the keeper of a prepared run: this process becomes it or, in a terminal, detaches it.

Whatever fails here, the script still runs: in the foreground where no keeper can be detached,
directly where nothing at all is possible.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import mpwatch
from mpwatch.cli.configuration import Configuration
from mpwatch.cli.options import SCALER_KNOBS
from mpwatch.cli.places import Place, prepare, write_run_file
from mpwatch.errors import UsageError
from mpwatch.keeper_files import say
from mpwatch.spawning import given_environment

AGENT_VARIABLE: Final = "_MPWATCH_AGENT"
FOR_AGENT: Final = (
    "max_steps",
    "accumulate",
    "schedule",
    "lr_rule",
    "lr_ramp",
    "noise_scale",
    "inject",
    "grad_norm_every",
    "memory_every",
    "gradients_every",
    "gradients_exact",
    "activations_every",
    "locate",
    "dump_bad_batch",
    "replay_batch",
    "precision",
    "scaler",
    *SCALER_KNOBS,
    "on_nonfinite",
)


def launch(
    command: list[str], configuration: Configuration, inject: bool, keyboard: bool = False
) -> int:
    """Become the keeper of `command`, or, where nothing can be prepared, the command itself.

    In a terminal the keeper is detached and this process becomes its first watcher; only then does
    this return, with the exit code. Not for a command that is known to read the `keyboard`.

    Raises:
        UsageError: the directory that the user named cannot be written, or a terminal that cannot
            show the screen.
    """
    environment = _without_outer_agent_specification(given_environment())
    if not hasattr(signal, "sigtimedwait"):
        say("runs unwatched: the keeper needs Linux")
        execute_unwatched(command, environment)
    if _in_terminal() and not configuration.value("headless") and not keyboard:
        return _launch_beneath_screen(command, configuration, inject, environment)
    place = prepare(command, configuration, inject)
    if place is None:
        execute_unwatched(command, environment)
    specification = _specification(place, configuration, inject, environment, os.getpid())
    return _become_keeper(specification, command, environment)


def _launch_beneath_screen(
    command: list[str],
    configuration: Configuration,
    inject: bool,
    environment: dict[str, str],
) -> int:
    from mpwatch.cli import detach, screen

    screen.check_terminal("mpwatch run --headless ...")
    keeper = detach.DetachedKeeper(lambda given: _exec_keeper(given, command, environment))
    try:
        place = prepare(command, configuration, inject, keeper.pid)
    except BaseException:
        keeper.give_up()
        raise
    if place is not None and place.runtime is not None:
        given = _specification(place, configuration, inject, environment, keeper.pid)
        keeper.start({**given, "terminal": True})
        if keeper.answers(place.directory):
            return screen.watch_in_terminal(place.directory, first=True, ended=keeper.exit_code)
    else:
        keeper.give_up()
    # No place for sockets, or no process to be had: the script runs in the foreground.
    if place is None:
        execute_unwatched(command, environment)
    with contextlib.suppress(OSError):  # full by now: the script runs all the same
        write_run_file(place, command, configuration, inject, os.getpid())
    specification = _specification(place, configuration, inject, environment, os.getpid())
    return _become_keeper(specification, command, environment)


def _specification(
    place: Place,
    configuration: Configuration,
    inject: bool,
    environment: dict[str, str],
    keeper_pid: int,
) -> dict[str, Any]:
    """What the keeper is told."""
    agent = agent_specification(place, configuration, environment) if inject else None
    return {
        "run_directory": str(place.directory),
        "hub": hub_command(place) if place.runtime is not None else None,
        "agent": agent,
        "inject": _inject_directory() if agent is not None else None,
        "die_with_keeper": configuration.value("die_with_keeper"),
        "grace_s": configuration.value("grace"),
        "keeper_pid": keeper_pid,
        "terminal": False,
        "answer": None,
    }


def execute_unwatched(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `command`, as if mpwatch had never been there."""
    # Python ignored these two for itself; a command that is not Python would inherit it.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None


def _become_keeper(
    specification: dict[str, Any], command: list[str], environment: dict[str, str]
) -> NoReturn:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        _exec_keeper(specification, command, environment)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        say(f"runs unwatched: cannot start the keeper: {error.strerror}")
        execute_unwatched(command, environment)


def _exec_keeper(
    specification: dict[str, Any], command: list[str], environment: dict[str, str]
) -> NoReturn:
    from mpwatch.keeper import WATCHED

    # From here on a signal waits for the keeper, which knows what to do with it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    specification["signal_mask"] = sorted(int(number) for number in mask)
    keeper = os.path.join(os.path.dirname(mpwatch.__file__), "keeper.py")
    # The text keeps the bytes of every path: encoded here as it was decoded, read there as UTF-8.
    text = json.dumps(specification, ensure_ascii=False)
    words = [sys.executable, "-I", "-S", "-X", "utf8", keeper, text, *command]
    os.execve(sys.executable, words, environment)


def _without_outer_agent_specification(environment: dict[str, str]) -> dict[str, str]:
    """A run started inside another run's command is its own: undo what the outer keeper set."""
    with contextlib.suppress(KeyError, ValueError, TypeError):
        outer = json.loads(environment.pop(AGENT_VARIABLE))
        original = outer["pythonpath"]
        if original is None:
            environment.pop("PYTHONPATH", None)
        else:
            environment["PYTHONPATH"] = str(original)
    return environment


def agent_specification(
    place: Place, configuration: Configuration, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """What the agent finds in its environment; None where no agent can get in or talk."""
    if place.runtime is None:
        return None
    inject = _inject_directory()
    if inject is None or os.pathsep in inject:
        say("runs unwatched: no agent is installed beside this mpwatch (mpwatch_agent)")
        return None
    return {
        "run_id": place.run_id,
        "run_directory": str(place.directory),
        "runtime_directory": str(place.runtime),
        "pythonpath": environment.get("PYTHONPATH"),
        "settings": {name: configuration.value(name) for name in FOR_AGENT},
    }


def _inject_directory() -> str | None:
    """The directory of the agent's `sitecustomize`, found without importing the agent."""
    found = importlib.util.find_spec("mpwatch_agent")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        directory = os.path.join(os.path.abspath(folder), "inject")
        if os.path.isfile(os.path.join(directory, "sitecustomize.py")):
            return directory
    return None


def hub_command(place: Place) -> list[str]:
    words = [sys.executable, "-P", "-m", "mpwatch.hub_process", str(place.directory)]
    return words if place.recorded else [*words, "--no-record"]


def _in_terminal() -> bool:
    """Whether there is a terminal to show a screen on, and nothing that goes elsewhere."""
    try:
        return os.isatty(0) and os.isatty(1) and os.isatty(2)
    except OSError:
        return False
