"""Finds runs and says what became of them: directories, names, liveness, state.

Reads run.json, keeper.jsonl and the agents' lock files; never writes, and asks no hub. Runs live in
a runs directory; unrecorded ones in the runtime root.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from mpwatch import rendezvous
from mpwatch.errors import RunNotFound
from mpwatch.run_state import (
    Attempt,
    Evidence,
    attempts_of,
    cause_of,
    ended_state,
    live_state,
)
from mpwatch.vocabulary import State, clean_text

RUNS_DIRECTORY: Final = "mpwatch-runs"
LATEST: Final = "latest"
REASON_BYTES: Final = 2000


class Run(NamedTuple):
    """One run as its files describe it; texts are cleaned, `info` is run.json as it is."""

    directory: Path
    run_id: str
    name: str | None
    started_at: float
    info: dict[str, Any]
    attempts: list[Attempt]
    ended: bool

    @property
    def exit_code(self) -> int | None:
        """Of the last attempt; None while it runs and where nobody saw its end."""
        return self.attempts[-1].exit_code if self.attempts else None


def read_run(directory: Path) -> Run | None:
    """The run in `directory`, or None where there is none that can be read."""
    info = rendezvous.read_json(directory / rendezvous.RUN_FILE)
    if info is None:
        return None
    entries = rendezvous.read_json_lines(directory / rendezvous.KEEPER_FILE)
    name, started_at = info.get("name"), info.get("started_at")
    return Run(
        directory=directory,
        run_id=clean_text(str(info.get("run_id") or directory.name), 100),
        name=clean_text(name, 100) if isinstance(name, str) else None,
        started_at=float(started_at) if isinstance(started_at, int | float) else 0.0,
        info=info,
        attempts=attempts_of(entries),
        ended=any(entry.get("event") == "ended" for entry in entries),
    )


def list_runs(directory: Path) -> list[Run]:
    """The runs below `directory` and the unrecorded ones from here, newest first.

    An unrecorded run has no directory of its own to be found in; of those started elsewhere only
    the ones that still run are of interest.
    """
    here = working_directory()
    unrecorded = [
        run
        for run in _runs_below(rendezvous.runtime_root())
        if run.info.get("cwd") == here or is_live(run)
    ]
    found = [*_runs_below(directory), *unrecorded]
    return sorted(found, key=lambda run: (run.started_at, run.run_id), reverse=True)


def working_directory() -> str | None:
    """Where we are; None where that directory was deleted under us."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _runs_below(directory: Path) -> Iterable[Run]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                run = read_run(Path(entry.path))
                if run is not None:
                    yield run


def find(name: str | None, directory: Path) -> Run:
    """The run that `name` means: an id, the start of one, a name, a directory or "latest".

    None means the only running job, or the newest run where none runs.

    Raises:
        RunNotFound: none answers to it, or more than one.
    """
    if name is not None and (os.sep in name or name in (".", "..")):
        return _at(Path(name))
    found = list_runs(directory)
    if name is None:
        return _default(found, directory)
    if name == LATEST:
        return _newest(found, directory)
    for exact in ([r for r in found if r.run_id == name], [r for r in found if r.name == name]):
        if exact:
            # Of several runs with one name: the one that runs, else the newest.
            return next((run for run in exact if is_live(run)), exact[0])
    if os.path.isfile(os.path.join(name, rendezvous.RUN_FILE)):
        return _at(Path(name))
    matching = [run for run in found if name and run.run_id.startswith(name)]
    shown = clean_text(name, 100)
    if not matching:
        raise RunNotFound(f"no run {shown!r} in {directory}; see: mpwatch ls")
    if len(matching) > 1:
        raise RunNotFound(f"{shown!r} is the start of {len(matching)} runs: {_names(matching)}")
    return matching[0]


def _at(directory: Path) -> Run:
    run = read_run(directory)
    if run is None:
        raise RunNotFound(f"no run in {clean_text(str(directory), 300)}")
    return run


def _default(found: list[Run], directory: Path) -> Run:
    live = [run for run in found if is_live(run)]
    if len(live) > 1:
        raise RunNotFound(f"{len(live)} jobs are running, say which: {_names(live)}")
    return live[0] if live else _newest(found, directory)


def _newest(found: list[Run], directory: Path) -> Run:
    if not found:
        raise RunNotFound(f"no runs in {directory}; start one: mpwatch run train.py")
    return found[0]


def _names(runs: list[Run]) -> str:
    shown = [f"{run.run_id} ({run.name})" if run.name else run.run_id for run in runs[:10]]
    return ", ".join(shown) + (", ..." if len(runs) > 10 else "")


def is_live(run: Run) -> bool:
    """Whether the run's script lives, or its keeper is about to start it."""
    last = run.attempts[-1] if run.attempts else None
    if run.ended:
        return False
    if last is not None and last.ended:
        return keeper_lives(run)
    return _script_lives(run, last) or keeper_lives(run)


def _script_lives(run: Run, last: Attempt | None) -> bool:
    if last is None or last.pid is None:
        return False
    if _is_foreign(run):
        return rendezvous.written_lately(run.directory)
    return rendezvous.is_alive(last.pid, last.start_time)


def keeper_lives(run: Run) -> bool:
    """Whether the run's keeper lives, on this machine."""
    keeper = run.info.get("keeper")
    pid = keeper.get("pid") if isinstance(keeper, dict) else None
    if not isinstance(keeper, dict) or not isinstance(pid, int) or _is_foreign(run):
        return False
    start_time = keeper.get("start_time")
    return rendezvous.is_alive(pid, start_time if isinstance(start_time, int) else None)


def keeper_is_gone(run: Run) -> bool:
    """Whether the run's keeper is known to be dead; on another machine nobody can tell."""
    return not _is_foreign(run) and not keeper_lives(run)


def _is_foreign(run: Run) -> bool:
    return rendezvous.foreign_host(run.info) is not None


def with_agent_files(run: Run, evidence: Evidence | None) -> Evidence:
    """`evidence` of the record, completed by what the agents left: they need no hub to bind."""
    if evidence is not None and evidence.bound:
        return evidence
    bound = None if evidence is None else evidence.bound
    runtime = run.info.get("runtime_directory")
    if not run.info.get("watched", True):
        bound = False
    elif isinstance(runtime, str):
        with contextlib.suppress(OSError, ValueError):  # no path, in a damaged file
            bound = any(name.startswith("rank-") for name in os.listdir(runtime))
    return (evidence or Evidence())._replace(bound=bound)


def state_of(run: Run, evidence: Evidence) -> State:
    """The state of `run`, given what events told (see `with_agent_files`)."""
    last = run.attempts[-1] if run.attempts else None
    if last is not None and last.ended:
        return ended_state(last, evidence)
    if last is None:
        return "starting" if keeper_lives(run) else "lost"
    if _script_lives(run, last) or keeper_lives(run):
        # An unwatched script runs; that it never binds says nothing.
        watched = run.info.get("watched", True)
        return live_state(evidence if watched else evidence._replace(bound=None))
    return "lost"


def described_attempts(run: Run, evidence: Evidence) -> list[dict[str, Any]]:
    """The attempts as `show --json` has them: n, started_at, exit_code, cause."""
    return [
        {
            "n": attempt.n,
            "started_at": attempt.started_at,
            "exit_code": attempt.exit_code,
            "cause": cause_of(attempt, evidence, last=attempt is run.attempts[-1]),
        }
        for attempt in run.attempts
    ]


def unwatched_reason(run: Run) -> str | None:
    """Why an agent could not get into a process of the run; None where none left a reason."""
    try:
        with open(run.directory / rendezvous.UNWATCHED_FILE, "rb") as file:
            text = file.read(REASON_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return clean_text(text.strip(), 300) or None
