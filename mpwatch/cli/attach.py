"""Watch a job in the terminal: mpwatch attach [RUN]. Leave with q; the job goes on.

Several may watch at once. --readonly shows and never gives the job a command.
"""

import argparse

from mpwatch.cli import screen
from mpwatch.cli.choice import add_run, chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch attach`."""
    add_run(parser)
    parser.add_argument("--readonly", action="store_true", help="look only: no pause, no stop")
    add_ascii(parser)


def add_ascii(parser: argparse.ArgumentParser) -> None:
    """Declare --ascii."""
    parser.add_argument(
        "--ascii", action="store_true", help="draw with ASCII only (by itself where not UTF-8)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the screen until the user leaves."""
    screen.check_terminal("mpwatch tail RUN, or mpwatch show RUN")
    found = chosen(arguments)
    return screen.watch_in_terminal(
        found.directory, readonly=arguments.readonly, plain_ascii=arguments.ascii
    )
