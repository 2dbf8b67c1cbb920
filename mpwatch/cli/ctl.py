"""Give a running job a command and wait for its outcome: mpwatch ctl RUN COMMAND [ARGUMENTS].

Exit code 0: applied, 1: refused, 2: not a command, 3: no answer, or the run has ended.
"""

import argparse
import time
from pathlib import Path

import msgspec

from mpwatch import client, runs
from mpwatch.cli.choice import add_run, chosen
from mpwatch.cli.configuration import runs_directory
from mpwatch.cli.formats import to_json
from mpwatch.commands import COMMANDS, Command, parse
from mpwatch.errors import EXIT_OK, EXIT_REFUSED, NoAnswer, RecordUnreadable, UsageError
from mpwatch.runs import Run
from mpwatch.store import CommandSeen
from mpwatch.vocabulary import clean_text

TIMEOUT_S = 30.0
OTHERS_NAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mpwatch ctl`."""
    add_run(parser, optional=False)
    commands = ", ".join(sorted(COMMANDS))
    parser.add_argument("command", metavar="COMMAND", help=commands)
    parser.add_argument("words", metavar="ARGUMENT", nargs="*", help="values, or field=value")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for the outcome (default {TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="the outcome as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Send, wait, print one line."""
    command = parse(arguments.command, arguments.words)
    if not 0 < arguments.timeout < 1e6:
        raise UsageError(f"--timeout {arguments.timeout:g}: seconds, more than 0")
    found = chosen(arguments)
    if not runs.is_live(found):
        raise NoAnswer(_ended(found, arguments))
    if (apart := client.out_of_reach(found.directory)) is not None:
        raise NoAnswer(f"{apart}: it takes no commands from here")
    seen = _outcome(found, command, time.monotonic() + arguments.timeout)
    print(to_json(msgspec.to_builtins(seen)) if arguments.json else _line(seen))
    return EXIT_OK if seen.outcome == "applied" else EXIT_REFUSED


def _ended(run: Run, arguments: argparse.Namespace) -> str:
    """Who gives a command to a run that is over may mean another one."""
    directory = Path(runs_directory(arguments.runs_dir))
    live = [each.name or each.run_id for each in runs.list_runs(directory) if runs.is_live(each)]
    others = f"running now: {', '.join(live[:OTHERS_NAMED])}" if live else "none is running now"
    return (
        f"the run has ended: {run.run_id} takes no commands any more; what it did: mpwatch show"
        f" {run.run_id}; {others}"
    )


def _outcome(run: Run, command: Command, deadline: float) -> CommandSeen:
    """Hand the command in and wait; a hub that is just being replaced is waited for."""
    job = client.LiveJob(run.directory, deadline - time.monotonic())
    identifier = ""
    try:
        identifier = job.send(command)
        return job.outcome(identifier, deadline - time.monotonic())
    except client.JobOver:
        return _recorded_outcome(run, identifier)
    finally:
        job.close()


def _recorded_outcome(run: Run, identifier: str) -> CommandSeen:
    """The job ended while we waited, perhaps because of this command."""
    try:
        record = client.open_job(run.directory)
    except RecordUnreadable as error:
        raise NoAnswer(f"the job ended before it answered ({error})") from None
    try:
        return record.outcome(identifier, 0.0)
    except NoAnswer:
        raise NoAnswer(
            f"the run has ended before the command took effect; what it did: mpwatch show"
            f" {run.run_id}"
        ) from None
    finally:
        record.close()


def _line(seen: CommandSeen) -> str:
    words = [clean_text(seen.command, 60), clean_text(seen.outcome or "pending", 20)]
    if seen.step is not None:
        words.append(f"at step {seen.step}")
    return " ".join(words) + (f": {clean_text(seen.reason, 300)}" if seen.reason else "")
