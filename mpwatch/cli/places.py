"""The places of a run, made before it starts: its directory with run.json, and one for sockets.

Falls back rather than failing: unrecorded when the default place cannot be written, unwatched when
no private place for sockets can be had. Only a place that the user named and that cannot be used
is an error. Called by `mpwatch.cli.launch` and `mpwatch.cli.serve`.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import mpwatch
from mpwatch import rendezvous
from mpwatch.cli.configuration import Configuration
from mpwatch.cli.options import SCALER_KNOBS
from mpwatch.cli.provenance import git_commit
from mpwatch.cli.redaction import redact
from mpwatch.cli.sweep import sweep
from mpwatch.errors import MpwatchError, RuntimeDirectoryRefused, UsageError
from mpwatch.keeper_files import say
from mpwatch.runs import RUNS_DIRECTORY, working_directory
from mpwatch.vocabulary import clean_text

IN_RUN_FILE: Final = (
    "headless",
    "max_steps",
    "accumulate",
    "schedule",
    "lr_rule",
    "lr_ramp",
    "noise_scale",
    "inject",
    "precision",
    "scaler",
    *SCALER_KNOBS,
    "on_nonfinite",
    "grad_norm_every",
    "memory_every",
    "gradients_every",
    "activations_every",
    "locate",
    "stall_after",
    "grace",
    "die_with_keeper",
)


class Place(NamedTuple):
    """Where a run lives. `runtime` is None where no private directory for sockets can be had."""

    run_id: str
    directory: Path
    runtime: Path | None
    recorded: bool


def prepare(
    command: list[str], configuration: Configuration, inject: bool, keeper_pid: int | None = None
) -> Place | None:
    """Make the run's directories and run.json; None: there is no place at all.

    `keeper_pid` is the process that will be the keeper, where that is another one than this.

    Raises:
        UsageError: the directory that the user named cannot be written.
    """
    keeper_pid = keeper_pid or os.getpid()
    sweep(rendezvous.runtime_root())
    if not configuration.value("no_record"):
        try:
            return _recorded_place(command, configuration, inject, keeper_pid)
        except OSError as error:
            base = clean_text(configuration.value("runs_dir") or RUNS_DIRECTORY)
            if not configuration.is_default("runs_dir"):
                raise UsageError(f"cannot write runs to {base}: {error.strerror}") from None
            say(f"runs unrecorded: cannot write to {base}: {error.strerror}; see --runs-dir")
    try:
        return _unrecorded_place(command, configuration, inject, keeper_pid)
    except (OSError, MpwatchError) as error:
        say(f"runs unwatched: {error}")
        return None


def _recorded_place(
    command: list[str], configuration: Configuration, inject: bool, keeper_pid: int
) -> Place:
    base = Path(os.path.abspath(configuration.value("runs_dir") or RUNS_DIRECTORY))
    base.mkdir(0o700, parents=True, exist_ok=True)
    _keep_out_of_git(base)
    run_id, directory = _new_directory(base)
    place = Place(run_id, directory, _runtime_for(directory), recorded=True)
    try:
        write_run_file(place, command, configuration, inject, keeper_pid)
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise
    return place


def _unrecorded_place(
    command: list[str], configuration: Configuration, inject: bool, keeper_pid: int
) -> Place:
    root = rendezvous.make_private(rendezvous.runtime_root())
    run_id, directory = _new_directory(root)
    place = Place(run_id, directory, rendezvous.make_runtime_directory(directory), recorded=False)
    write_run_file(place, command, configuration, inject, keeper_pid)
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


def write_run_file(
    place: Place,
    command: list[str],
    configuration: Configuration,
    inject: bool,
    keeper_pid: int,
) -> None:
    """Write run.json: what is known before the start."""
    here = working_directory()
    entry = {
        "run_id": place.run_id,
        "name": configuration.value("name") or name_of(command),
        "argv": redact(command),
        "cwd": here,
        "python_version": sys.version.split()[0],
        "mpwatch_version": mpwatch.__version__,
        "commit": None if here is None else git_commit(here),
        "host": os.uname().nodename,
        "started_at": time.time(),
        "runtime_directory": None if place.runtime is None else str(place.runtime),
        "recorded": place.recorded,
        "watched": inject and place.runtime is not None,
        "keeper": {
            "pid": keeper_pid,
            "start_time": rendezvous.process_start_time(keeper_pid),
        },
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
