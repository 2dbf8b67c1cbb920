"""The RUN of verbs that read: declared and resolved in one place."""

import argparse
from pathlib import Path

from mpwatch import runs
from mpwatch.cli.configuration import runs_directory
from mpwatch.runs import Run


def add_run(parser: argparse.ArgumentParser, optional: bool = True) -> None:
    """Declare RUN and --runs-dir."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?" if optional else None,
        help="id, start of an id, name, directory, or latest",
    )
    add_runs_directory(parser)


def add_runs_directory(parser: argparse.ArgumentParser) -> None:
    """Declare --runs-dir."""
    parser.add_argument("--runs-dir", metavar="DIR", help="where the runs are (mpwatch-runs)")


def chosen(arguments: argparse.Namespace) -> Run:
    """The run that was asked for.

    Raises:
        RunNotFound: none, or more than one.
    """
    return runs.find(arguments.run, Path(runs_directory(arguments.runs_dir)))
