"""List the runs of this directory, newest first; asks no hub."""

import argparse
from pathlib import Path
from typing import Any

from mpwatch import rendezvous, runs
from mpwatch.cli.choice import add_runs_directory
from mpwatch.cli.configuration import runs_directory
from mpwatch.cli.formats import moment, table, to_json
from mpwatch.errors import EXIT_OK
from mpwatch.glance import glance
from mpwatch.runs import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch ls`."""
    add_runs_directory(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    directory = Path(runs_directory(arguments.runs_dir))
    entries = [_entry(run) for run in runs.list_runs(directory)]
    if arguments.json:
        print(to_json(entries))
    elif entries:
        header = ["RUN", "NAME", "STATE", "STEPS", "STARTED", "EXIT"]
        print(table([header, *map(_row, entries)], numbers=frozenset({3, 5})))
    else:
        print(f"no runs in {directory}")
    return EXIT_OK


def _entry(run: Run) -> dict[str, Any]:
    record = (run.directory / rendezvous.RECORD_FILE).absolute()
    known = runs.with_agent_files(run, glance(record) if record.exists() else None)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": runs.state_of(run, known),
        "steps": known.steps,
        "started_at": run.started_at,
        "exit_code": run.exit_code,
        "recorded": bool(run.info.get("recorded", True)),
        "directory": str(run.directory.absolute()),
    }


def _row(entry: dict[str, Any]) -> list[str]:
    shown = ("run_id", "name", "state", "steps", "started_at", "exit_code")
    row = ["-" if entry[key] is None else str(entry[key]) for key in shown]
    row[4] = moment(entry["started_at"])
    return row
