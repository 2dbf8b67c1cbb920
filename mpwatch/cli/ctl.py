"""Give a running job a command and wait for its outcome: mpwatch ctl RUN COMMAND [ARGUMENTS].

Exit code 0: applied, 1: refused, 2: not a command, 3: no answer.
"""

import argparse

from mpwatch import client, runs
from mpwatch.cli.choice import add_run, chosen
from mpwatch.cli.formats import to_json
from mpwatch.commands import COMMANDS, parse
from mpwatch.errors import EXIT_NO_ANSWER, EXIT_OK, EXIT_REFUSED, NoAnswer, UsageError
from mpwatch.vocabulary import clean_text

TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mpwatch ctl`."""
    add_run(parser, optional=False)
    commands = ", ".join(sorted(COMMANDS))
    parser.add_argument("command", metavar="COMMAND", help=commands)
    parser.add_argument("words", metavar="ARGUMENT", nargs="*", help="values, or field=value")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="the outcome as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Send, wait, print one line."""
    command = parse(arguments.command, arguments.words)
    if not 0 < arguments.timeout < 1e6:
        raise UsageError(f"--timeout {arguments.timeout}: seconds, more than 0")
    found = chosen(arguments)
    if not runs.is_live(found):
        raise NoAnswer(f"run {found.run_id} does not run any more; see: mpwatch show")
    source = client.open_job(found.directory)
    try:
        identifier = source.send(command, "person")
        outcome = source.outcome(identifier, arguments.timeout)
    finally:
        source.close()
    return 0
