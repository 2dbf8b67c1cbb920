"""Prepares a run's places and run.json, then execs into the keeper.

Whatever fails here, the script still runs: unrecorded when the default place cannot be written,
unwatched when no private place for sockets can be had, directly when nothing at all is possible.
Only a place that the user named and that cannot be used is an error.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import mpwatch
from mpwatch import rendezvous
from mpwatch.cli.configuration import Configuration
from mpwatch.cli.options import SCALER_KNOBS
from mpwatch.cli.provenance import git_commit
from mpwatch.cli.redaction import redact
from mpwatch.errors import MpwatchError, RuntimeDirectoryRefused, UsageError
from mpwatch.keeper_files import say
from mpwatch.runs import RUNS_DIRECTORY
from mpwatch.spawning import given_environment
from mpwatch.vocabulary import clean_text

AGENT_VARIABLE: Final = "_MPWATCH_AGENT"
IN_RUN_FILE: Final = (
    "headless",
    "max_steps",
    "inject",
    "precision",
    "scaler",
    *SCALER_KNOBS,
    "on_nonfinite",
    "grad_norm_every",
    "memory_every",
    "stall_after",
    "grace",
    "die_with_keeper",
)
FOR_AGENT: Final = (
    "max_steps",
    "inject",
    "grad_norm_every",
    "memory_every",
    "precision",
    "scaler",
    *SCALER_KNOBS,
    "on_nonfinite",
)


class Place(NamedTuple):
    """Where a run lives. `runtime` is None where no private directory for sockets can be had."""

    run_id: str
    directory: Path
    runtime: Path | None
    recorded: bool


def launch(command: list[str], configuration: Configuration, inject: bool) -> NoReturn:
    """Become the keeper of `command`, or, where nothing can be prepared, the command itself.

    Raises:
        UsageError: the directory that the user named cannot be written.
    """
    environment = _without_outeragent_specification(given_environment())
    if not hasattr(signal, "sigtimedwait"):
        say("runs unwatched: the keeper needs Linux")
        execute_unwatched(command, environment)
    place = prepare(command, configuration, inject)
    if place is None:
        execute_unwatched(command, environment)
    agent = agent_specification(place, configuration, environment) if inject else None
    specification = {
        "run_directory": str(place.directory),
        "hub": hub_command(place) if place.runtime is not None else None,
        "agent": agent,
        "inject": _inject_directory() if agent is not None else None,
        "die_with_keeper": configuration.value("die_with_keeper"),
        "grace_s": configuration.value("grace"),
        "keeper_pid": os.getpid(),
    }
    if _is_terminal() and not configuration.value("headless"):
        say(f"no screen in this version yet, running as --headless; run {place.run_id}")
    _become_keeper(specification, command, environment)


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
    from mpwatch.keeper import WATCHED

    # From here on a signal waits for the keeper, which knows what to do with it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    specification["signal_mask"] = sorted(int(number) for number in mask)
    keeper = os.path.join(os.path.dirname(mpwatch.__file__), "keeper.py")
    # The text keeps the bytes of every path: encoded here as it was decoded, read there as UTF-8.
    text = json.dumps(specification, ensure_ascii=False)
    words = [sys.executable, "-I", "-S", "-X", "utf8", keeper, text, *command]
    try:
        os.execve(sys.executable, words, environment)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        say(f"runs unwatched: cannot start the keeper: {error.strerror}")
        execute_unwatched(command, environment)


def _without_outeragent_specification(environment: dict[str, str]) -> dict[str, str]:
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


def prepare(command: list[str], configuration: Configuration, inject: bool) -> Place | None:
    """Make the run's directories and run.json; None: there is no place at all."""
    if not configuration.value("no_record"):
        try:
            return _recorded_place(command, configuration, inject)
        except OSError as error:
            base = clean_text(configuration.value("runs_dir") or RUNS_DIRECTORY)
            if not configuration.is_default("runs_dir"):
                raise UsageError(f"cannot write runs to {base}: {error.strerror}") from None
            say(f"runs unrecorded: cannot write to {base}: {error.strerror}; see --runs-dir")
    try:
        return _unrecorded_place(command, configuration, inject)
    except (OSError, MpwatchError) as error:
        say(f"runs unwatched: {error}")
        return None


def _recorded_place(command: list[str], configuration: Configuration, inject: bool) -> Place:
    base = Path(os.path.abspath(configuration.value("runs_dir") or RUNS_DIRECTORY))
    base.mkdir(0o700, parents=True, exist_ok=True)
    _keep_out_of_git(base)
    run_id, directory = _new_directory(base)
    place = Place(run_id, directory, _runtime_for(directory), recorded=True)
    try:
        _write_run_file(place, command, configuration, inject)
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise
    return place


def _unrecorded_place(command: list[str], configuration: Configuration, inject: bool) -> Place:
    root = rendezvous.make_private(rendezvous.runtime_root())
    run_id, directory = _new_directory(root)
    place = Place(run_id, directory, rendezvous.make_runtime_directory(directory), recorded=False)
    _write_run_file(place, command, configuration, inject)
    return place


def _new_directory(base: Path) -> tuple[str, Path]:
    while True:
        run_id = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()
        with contextlib.suppress(FileExistsError):
            (base / run_id).mkdir(0o700)
            return run_id, base / run_id


def _runtime_for(directory: Path) -> Path | None:
    try:
        return rendezvous.make_runtime_directory(directory)
    except (RuntimeDirectoryRefused, OSError) as error:
        say(f"runs unwatched: {error}")
        return None


def _keep_out_of_git(base: Path) -> None:
    with contextlib.suppress(FileExistsError), open(base / ".gitignore", "x") as file:
        file.write("*\n")


def _write_run_file(
    place: Place, command: list[str], configuration: Configuration, inject: bool
) -> None:
    pid = os.getpid()
    entry = {
        "run_id": place.run_id,
        "name": configuration.value("name") or name_of(command),
        "argv": redact(command),
        "cwd": os.getcwd(),
        "python_version": sys.version.split()[0],
        "mpwatch_version": mpwatch.__version__,
        "commit": git_commit(os.getcwd()),
        "host": os.uname().nodename,
        "started_at": time.time(),
        "runtime_directory": None if place.runtime is None else str(place.runtime),
        "recorded": place.recorded,
        "watched": inject and place.runtime is not None,
        "keeper": {"pid": pid, "start_time": rendezvous.process_start_time(pid)},
        "settings": {name: configuration.value(name) for name in IN_RUN_FILE},
        "plan": configuration.plan,
    }
    rendezvous.write_json(place.directory / rendezvous.RUN_FILE, entry)


def name_of(command: Sequence[str]) -> str | None:
    """A name for a run that was given none: its script's or module's, else its command's."""
    words = [*command]
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None and "-m" in words[1:-1]:
        script = words[words.index("-m", 1) + 1].rpartition(".")[2]
    name = clean_text(os.path.basename(script or words[0]).removesuffix(".py"), 80)
    return name or None


def _is_terminal() -> bool:
    try:
        return os.isatty(0) and os.isatty(1)
    except OSError:
        return False
