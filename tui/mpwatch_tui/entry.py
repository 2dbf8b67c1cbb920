"""The way in from the command line: builds what the app needs and runs it.

Called by `mpwatch.cli.screen` in the process that owns the terminal; nothing else starts the app.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mpwatch_tui.app import WatchApp
from mpwatch_tui.looks import Looks
from mpwatch_tui.places import RunPlaces
from mpwatch_tui.watching import Watching


def show(
    run_directory: Path,
    *,
    revive: Callable[[Path], None],
    stop_now: Callable[[Path], str],
    readonly: bool = False,
    replay: bool = False,
    plain_ascii: bool = False,
    guard: int | None = None,
) -> int:
    """Show the run until the user leaves; returns the exit code.

    `revive` and `stop_now` act on the run directory; see `mpwatch_tui.places.Places`.
    """
    places = RunPlaces(run_directory, revive, stop_now, replay)
    app = WatchApp(
        Watching(places),
        looks_of_terminal(plain_ascii),
        readonly=readonly,
        replay=replay,
        guard=guard,
    )
    gc.freeze()
    gc.enable()
    # Without reports of the mouse the terminal's own selection copies text, and its wheel sends
    # arrow keys, which scroll the log.
    app.run(mouse=False)
    return app.return_code or 0


def looks_of_terminal(plain_ascii: bool) -> Looks:
    """What this terminal can show, decided once."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return Looks(
        ascii=plain_ascii or not encoding.startswith("utf"),
        colours="NO_COLOR" not in os.environ,
    )
