"""The way in from the command line: builds what the app needs and runs it.

Called by `mpwatch.cli.screen` in the process that owns the terminal; nothing else starts the app.
"""

from pathlib import Path
from typing import ClassVar


def show(
    run_directory: Path, *, readonly: bool, replay: bool, plain_ascii: bool, guard: int
) -> int:
    """Show the run until the user leaves; returns the exit code."""
    from textual.app import App, ComposeResult
    from textual.widgets import Static

    class First(App[int]):
        BINDINGS: ClassVar = [("q", "quit", "detach")]

        def compose(self) -> ComposeResult:
            yield Static(f"run {run_directory.name}")

    app = First()
    app.run()
    return app.return_code or 0
