"""What the keeper says and hears: keeper.jsonl out, requests.jsonl in, one line on stderr.

Standard library only. A file that cannot be written or read never changes the run.
"""

import contextlib
import json
import os
import time


def say(text: str) -> None:
    """One line on the script's stderr, in a single write."""
    with contextlib.suppress(OSError):
        os.write(2, f"mpwatch: {text}\n".encode("utf-8", "replace"))


class Journal:
    """keeper.jsonl: append-only, one write per entry; a full disk is nobody's business here."""

    def __init__(self, directory: str) -> None:
        self._descriptor: int | None = None
        self._torn = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            self._descriptor = os.open(os.path.join(directory, "keeper.jsonl"), flags, 0o600)

    def write(self, event: str, **fields: object) -> None:
        """Append one entry with the time of now."""
        if self._descriptor is None:
            return
        entry = {"event": event, **fields, "time": time.time()}
        # An entry cut by a full disk must not swallow the next one.
        line = ("\n" * self._torn + json.dumps(entry) + "\n").encode()
        try:
            self._torn = os.write(self._descriptor, line) != len(line)
        except OSError:
            self._torn = True


class Requests:
    """requests.jsonl: what others ask of the keeper; new whole lines since the last look."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "requests.jsonl")
        self._offset = 0

    def new(self) -> list[str]:
        """The names of the requests that came since the last call."""
        names = []
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size <= self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")
            self._offset += len(whole[0]) + len(whole[1])
            for line in whole[0].splitlines():
                with contextlib.suppress(ValueError, AttributeError, RecursionError):
                    names.append(str(json.loads(line).get("request")))
        return names
