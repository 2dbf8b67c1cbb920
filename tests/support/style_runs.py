"""Runs the style scripts, each once plain and once watched, both at a time.

A plain run is `python SCRIPT`, a watched one what a person gets: `mpwatch run --headless SCRIPT`.
Where a row of the table does not ask for an interpreter of its own, the script's process is forked
in both off one that has torch loaded already: keeper, hub and record are real all the same.
"""

import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.agent_runs import ROOT, plain_environment
from tests.support.forge import Forge
from tests.support.styles.table import Style

FOLDER = ROOT / "tests" / "support" / "styles"
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

    def __init__(self, directory: Path, forge: Forge) -> None:
        self._directory = directory
        self._forge = forge
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

    def _place(self, style: Style) -> Path:
        return self._directory / style.name

    def _run_plain(self, style: Style) -> Finished:
        books = self._place(style) / "plain.json"
        if style.own_interpreter:
            return _run(style.command, books)
        script, *arguments = style.command
        run = self._forge.run(
            script,
            self._place(style),
            *arguments,
            specification=None,
            environment={"STYLE_TRUTH": str(books)},
            cwd=FOLDER,
        )
        exit_code = run.wait(DEADLINE_S)
        stdout, stderr = (written.decode() for written in run.communicate())
        return _finished(exit_code, stdout, stderr, books)

    def _run_watched(self, style: Style) -> Finished:
        command = ("-m", "mpwatch", "run", "--headless", "--runs-dir", str(self.runs_dir(style)))
        if not style.own_interpreter:
            command += tuple(self._forge.interpreter)
        return _run((*command, *style.command), self._place(style) / "watched.json")


def _run(words: tuple[str, ...], books: Path) -> Finished:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=FOLDER,
        env=plain_environment(STYLE_TRUTH=str(books)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return _finished(done.returncode, done.stdout, done.stderr, books)


def _finished(exit_code: int, stdout: str, stderr: str, books: Path) -> Finished:
    kept = json.loads(books.read_text()) if books.exists() else {}
    return Finished(exit_code=exit_code, stdout=stdout, stderr=stderr, books=kept)
