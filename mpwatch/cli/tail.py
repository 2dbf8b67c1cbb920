"""Print a run's events as they come, until the job has ended; --json: one object per line."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mpwatch import client
from mpwatch.cli.choice import add_run, chosen
from mpwatch.cli.formats import to_json
from mpwatch.codec import Frame, decode_event, decode_frame
from mpwatch.errors import EXIT_OK, CodecError, UsageError
from mpwatch.events import Event, OutputLine
from mpwatch.vocabulary import clean_text, scale_words

Entry = tuple[int, Frame, Event]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch tail`."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="NDJSON: the event's fields and more")
    parser.add_argument(
        "--after", type=int, default=0, metavar="CURSOR", help="only what came after this event"
    )
    parser.add_argument("--no-follow", action="store_true", help="what is there, then end")


def run(arguments: argparse.Namespace) -> int:
    """Print until the job has ended."""
    if arguments.after < 0:
        raise UsageError(f"--after {arguments.after}: a cursor is 0 or more")
    directory = chosen(arguments).directory
    line = _json_line if arguments.json else _line
    if arguments.no_follow:
        entries: Iterable[Entry] = _present(directory, arguments.after)
    else:
        entries = client.follow(directory, arguments.after, _missed)
    for entry in entries:
        if not arguments.json and getattr(entry[2], "unfinished", False):
            continue  # a line that is still being drawn is told again
        sys.stdout.write(line(entry))
        sys.stdout.flush()
    return EXIT_OK


def _missed(count: int) -> None:
    """A run without a record keeps the newest events only."""
    print(f"mpwatch: {count} events before the next are gone", file=sys.stderr)


def _present(directory: Path, after: int) -> Iterable[Entry]:
    """What the hub or the record has now."""
    source = client.open_job(directory)
    try:
        while True:
            reply = source.changes(after, 1000)
            for cursor, data in reply.frames:
                try:
                    frame = decode_frame(data)
                    yield cursor, frame, decode_event(frame.event)
                except CodecError:
                    continue
            if reply.cursor >= reply.newest or reply.cursor <= after:
                return
            after = reply.cursor
    finally:
        source.close()


def _fields(event: Event) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(event)
    return fields


def _json_line(entry: Entry) -> str:
    cursor, frame, event = entry
    place = {
        "cursor": cursor,
        "time": frame.time,
        "attempt": frame.attempt,
        "rank": frame.rank,
    }
    return to_json({**place, **_fields(event)}) + "\n"


def _line(entry: Entry) -> str:
    cursor, frame, event = entry
    fields = _fields(event)
    kind = str(fields.pop("kind"))
    clock = time.strftime("%H:%M:%S", time.localtime(frame.time))
    sender = "hub" if frame.rank < 0 else f"rank {frame.rank}"
    if isinstance(event, OutputLine):
        left_out = f"({event.left_out} lines left out, see output.log)  " if event.left_out else ""
        sender, kind, words = "script", "", left_out + clean_text(event.text)
    else:
        words = " ".join(f"{name}={_field(name, value)}" for name, value in fields.items())
    head = f"{cursor:>7}  {clock}  {sender:<7} "
    return f"{head}{kind:<20} {words}\n" if kind else f"{head}{words}\n"


def _field(name: str, value: object) -> str:
    if "scale" in name and isinstance(value, float):
        return scale_words(value)
    return clean_text(_shown(value))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)
