"""Runs `mpwatch` as a person does, in real processes, and proves that none of them is left."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "agent", "tui"))
MPWATCH = [sys.executable, "-m", "mpwatch"]
DEADLINE_S = 60.0
# Every process of a test inherits this variable, whatever becomes of its parents.
MARKER = "_MPWATCH_TEST_PLACE"


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for `condition` to give something true, and return that."""
    end = time.monotonic() + deadline_s
    look_again = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        look_again.wait(0.01)
    return found


class Place:
    """A directory to run in, with its own temporary directory and marked processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Short: sockets go here, ours and those of DataLoader workers, and pytest's paths are long.
        self.temporary = Path(tempfile.mkdtemp(prefix="mp-"))
        weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)
        kept = {k: v for k, v in os.environ.items() if "MPWATCH" not in k}
        self.environment = {
            **kept,
            "PYTHONPATH": SOURCES,
            "TMPDIR": str(self.temporary),
            MARKER: str(directory),
        }

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script and return its name, relative as a person would give it."""
        (self.directory / name).write_text(text)
        return name

    def python(self, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """What plain Python does."""
        return self._run([sys.executable, *words], **options)

    def mpwatch(self, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run `mpwatch` to its end."""
        return self._run([*MPWATCH, *words], **options)

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        environment = {**self.environment, **options.pop("environment", {})}
        options.setdefault("input", b"")
        return subprocess.run(
            command,
            cwd=options.pop("cwd", self.directory),
            env=environment,
            capture_output=True,
            timeout=DEADLINE_S,
            **options,
        )

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start `mpwatch` in its own session, as far from this terminal as a job is."""
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("start_new_session", True)
        return subprocess.Popen(
            [*MPWATCH, *words], cwd=self.directory, env=self.environment, **options
        )

    # --- what runs leave ------------------------------------------------------------------

    def runs(self) -> list[Path]:
        """The run directories, oldest first."""
        found = (self.directory / "mpwatch-runs").glob("*/run.json")
        return sorted((path.parent for path in found), key=lambda path: path.stat().st_ctime)

    def run(self) -> Path:
        """The only run, as soon as it is there."""
        found: list[Path] = until(self.runs, "a run directory")
        assert len(found) == 1
        return found[0]

    def entry(self, event: str, count: int = 1, directory: Path | None = None) -> dict[str, Any]:
        """The `count`-th entry of this kind in keeper.jsonl, as soon as it is there."""
        directory = directory or self.run()

        def look() -> dict[str, Any] | None:
            found = [e for e in keeper_entries(directory) if e["event"] == event]
            return found[count - 1] if len(found) >= count else None

        entry: dict[str, Any] = until(look, f"{count} x {event} in keeper.jsonl")
        return entry

    def run_file(self) -> dict[str, Any]:
        """run.json of the only run."""
        content: dict[str, Any] = json.loads((self.run() / "run.json").read_text())
        return content

    def state(self, name: str = "latest") -> str:
        """What `ls` says of a run."""
        entries = json.loads(self.mpwatch("ls", "--json").stdout)
        wanted = [e for e in entries if name in ("latest", e["run_id"], e["name"])]
        return str(wanted[0]["state"])

    # --- processes ------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Every living process that was started from here, by the marker in its environment."""
        mark = f"{MARKER}={self.directory}".encode()
        found = []
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                given = Path(f"/proc/{name}/environ").read_bytes()
                if mark in given.split(b"\0"):
                    found.append(int(name))
        return found

    def none_left(self) -> None:
        """Nothing runs any more that was started from here; a hub may take its two seconds."""
        try:
            until(lambda: not self.processes(), "the end of every process", 15)
        finally:
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def until_ready(descriptor: int) -> None:
    """The script at the other end has printed `ready`."""
    seen = b""
    while b"ready\n" not in seen.replace(b"\r", b""):
        seen += os.read(descriptor, 1000)


def keeper_entries(directory: Path) -> list[dict[str, Any]]:
    """The whole lines of keeper.jsonl."""
    try:
        lines = (directory / "keeper.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def without_our_lines(output: bytes) -> bytes:
    """stderr without the lines that begin `mpwatch:`."""
    lines = output.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"mpwatch:"))
