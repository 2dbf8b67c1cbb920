"""Runs the style scripts, each once plain and once watched, both at a time.

A watched run is what a person gets: `python -m mpwatch run --headless SCRIPT`. A plain run is
`python SCRIPT`; where a row of the table does not ask for an interpreter of its own it is forked
off a process that has torch loaded already, which saves a third of the suite's time.
"""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.styles.table import Style

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "support" / "styles"
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "agent", "tui"))
DEADLINE_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a run of a style ended; `books` is what the script counted by hand, as it wrote it."""

    exit_code: int
    stdout: str
    stderr: str
    books: dict[str, Any]


class StyleRuns:
    """The runs that tests ask for; both of a style begin when one of them is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nursery = Nursery()
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._begun: dict[str, tuple[Future[Finished], Future[Finished]]] = {}

    def plain(self, style: Style) -> Finished:
        """How plain Python ran this style."""
        return self._both(style)[0].result()

    def watched(self, style: Style) -> Finished:
        """How the style ran under mpwatch."""
        return self._both(style)[1].result()

    def _both(self, style: Style) -> tuple[Future[Finished], Future[Finished]]:
        if style.name not in self._begun:
            self._place(style).mkdir()
            runs = (self._run_plain, self._run_watched)
            plain, watched = (self._pool.submit(run, style) for run in runs)
            self._begun[style.name] = plain, watched
        return self._begun[style.name]

    def runs_dir(self, style: Style) -> Path:
        """Where the watched run's directory lies, the only one there."""
        return self._place(style) / "runs"

    def close(self) -> None:
        """Wait for what is running, forget the rest."""
        self._pool.shutdown(cancel_futures=True)
        self._nursery.close()

    def _place(self, style: Style) -> Path:
        return self._directory / style.name

    def _run_plain(self, style: Style) -> Finished:
        books = self._place(style) / "plain.json"
        if style.own_interpreter:
            return _run([sys.executable, *style.command], books)
        return self._nursery.run(style.command, books)

    def _run_watched(self, style: Style) -> Finished:
        ours = ["-m", "mpwatch", "run", "--headless", "--runs-dir", str(self.runs_dir(style))]
        return _run([sys.executable, *ours, *style.command], self._place(style) / "watched.json")


class Nursery:
    """The process that plain runs are forked from, started when the first one is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: tuple[str, ...], books: Path) -> Finished:
        """Run a script to its end; one at a time."""
        stdout, stderr = books.with_suffix(".stdout"), books.with_suffix(".stderr")
        request = {
            "words": words,
            "environment": {"STYLE_TRUTH": str(books)},
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        with self._lock:
            self._process = self._process or _start_nursery()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            exit_code = int(self._process.stdout.readline())
        return Finished(
            exit_code=exit_code,
            stdout=stdout.read_text(),
            stderr=stderr.read_text(),
            books=json.loads(books.read_text()),
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _start_nursery() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py"))],
        cwd=FOLDER,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _run(command: list[str], books: Path) -> Finished:
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env=_environment() | {"STYLE_TRUTH": str(books)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Finished(
        exit_code=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        books=json.loads(books.read_text()) if books.exists() else {},
    )


def _environment() -> dict[str, str]:
    """The same for both: the packages on the path, one thread, nobody else's settings."""
    kept = {k: v for k, v in os.environ.items() if "MPWATCH" not in k}
    return kept | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
