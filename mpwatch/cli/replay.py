"""Look at a run's record in the terminal: mpwatch replay RUN. Needs no job and no hub."""

import argparse

from mpwatch.cli import screen
from mpwatch.cli.attach import add_ascii
from mpwatch.cli.choice import add_run, chosen
from mpwatch.rendezvous import RECORD_FILE
from mpwatch.replayed import ReplayedJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch replay`."""
    add_run(parser)
    add_ascii(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the screen until the user leaves."""
    screen.check_terminal("mpwatch show RUN")
    found = chosen(arguments)
    # A missing or foreign record is one line here, and would be an empty screen later.
    ReplayedJob(found.directory / RECORD_FILE).close()
    return screen.watch_in_terminal(found.directory, replay=True, plain_ascii=arguments.ascii)
