"""Runs detached beneath a screen that is left at once: what a terminal starts, without its cost."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

from mpwatch.events import OutputLine
from mpwatch.numbered import decoded
from mpwatch.replayed import ReplayedJob
from tests.support.cli_runs import Place, until

# The screen is tested elsewhere; here it is left as soon as it comes up.
LEFT_AT_ONCE = """
import sys
from mpwatch.cli import main, screen
screen.watch_in_terminal = lambda *_, **__: 0
sys.exit(main.main(["run", *sys.argv[1:]]))
"""

# Prints lines to `halfway`, waits to be told, prints the rest, says what it computed, and waits.
PRINTING = """
import hashlib, os, sys, threading
wait, digest = threading.Event().wait, hashlib.sha256()
first, rest = int(sys.argv[1]), int(sys.argv[2])
for number in range(first + rest):
    text = f"line {number} " + "x" * 60
    digest.update(text.encode())
    print(text, file=sys.stderr if number % 7 == 3 else sys.stdout, flush=True)
    if number == first - 1:
        open("halfway", "w").close()
        while not os.path.exists("go"):
            wait(0.01)
open("result.new", "w").write(digest.hexdigest())
os.replace("result.new", "result")
while not os.path.exists("end"):
    wait(0.01)
"""


class Detached:
    """A script that was started in a terminal which is gone."""

    def __init__(self, place: Place, *words: str, real_screen: bool = False) -> None:
        self.place = place
        script = [] if real_screen else ["-c", LEFT_AT_ONCE]
        command = [sys.executable, *script, *(["-m", "mpwatch", "run"] if real_screen else [])]
        self.terminal_pid, self.terminal = pty.fork()
        if self.terminal_pid == 0:
            size = struct.pack("HHHH", 24, 80, 0, 0)
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            os.chdir(place.directory)
            environment = {**place.environment, "TERM": "xterm-256color"}
            os.execve(command[0], [*command, *words], environment)
        self.directory = place.run()
        self.script: int = place.entry("spawned")["pid"]
        self.hub: int = place.entry("hub_started")["pid"]
        self.keeper: int = place.run_file()["keeper"]["pid"]

    @property
    def stand_in(self) -> int:
        """The keeper's child that is neither script nor hub."""
        children = Path(f"/proc/{self.keeper}/task/{self.keeper}/children").read_text().split()
        (found,) = {int(pid) for pid in children} - {self.script, self.hub}
        return found

    def left(self) -> int:
        """Wait for the end of what runs in the terminal; its exit code."""
        with contextlib.suppress(OSError):
            while os.read(self.terminal, 65536):
                pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.terminal_pid, 0)[1])

    def halfway(self) -> None:
        until((self.place.directory / "halfway").exists, "the first half of the output")

    def go_on(self) -> None:
        (self.place.directory / "go").touch()

    def end(self) -> None:
        (self.place.directory / "end").touch()

    def result(self) -> str:
        """What the script computed, once it is done."""
        found = self.place.directory / "result"
        until(found.exists, "the script's result")
        return found.read_text()

    def log(self) -> bytes:
        """What it printed, both files, without our own lines."""
        older, newer = self.directory / "output.log.1", self.directory / "output.log"
        data = (older.read_bytes() if older.exists() else b"") + newer.read_bytes()
        lines = data.splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(b"mpwatch:"))

    def told(self) -> list[OutputLine]:
        """The lines in the record, those that were finished, in the order of telling."""
        job = ReplayedJob(self.directory / "record.sqlite")
        try:
            found: list[OutputLine] = []
            cursor = 0
            while True:
                reply = job.changes(cursor, 2000)
                frames = [(number, bytes(frame)) for number, frame in reply.frames]
                found += [e for _, _, e in decoded(frames) if isinstance(e, OutputLine)]
                if reply.cursor >= reply.newest:
                    return [event for event in found if not event.unfinished]
                cursor = reply.cursor
        finally:
            job.close()
