"""A new hub for a job that has lost its own: watchers call `ensure_hub` before they connect.

The keeper starts hubs by itself while it lives; this is for when it is gone, or has given up.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

from mpwatch import rendezvous
from mpwatch.live import hub_is_there, job_is_over, out_of_reach
from mpwatch.runs import keeper_lives, read_run

# The keeper's own next try comes first, where there is a keeper.
KEEPER_WAIT_S: Final = 1.5
HUB_WAIT_S: Final = 5.0
LOOK_EVERY_S: Final = 0.02


def ensure_hub(run_directory: Path) -> None:
    """See that a hub serves the job, if the job lives.

    Never raises: without a hub there is the record. Waits until the hub can be asked, at most a few
    seconds. The hub is of its own session: it outlives whoever called, and ends by itself when the
    job has.
    """
    run = read_run(run_directory)
    if run is None or out_of_reach(run_directory) is not None:
        return
    runtime = rendezvous.runtime_directory(run_directory)
    if keeper_lives(run) and _there_within(KEEPER_WAIT_S, runtime, run_directory):
        return
    if hub_is_there(runtime) or job_is_over(run_directory):
        return
    try:
        _start(run_directory.absolute(), recorded=bool(run.info.get("recorded", True)))
    except OSError:
        return
    _there_within(HUB_WAIT_S, runtime, run_directory)


def _there_within(seconds: float, runtime: Path, run_directory: Path) -> bool:
    """Whether a hub is there in time, and has said where."""
    until = time.monotonic() + seconds
    endpoint = run_directory / rendezvous.ENDPOINT_FILE
    while not (hub_is_there(runtime) and endpoint.exists()):
        if time.monotonic() > until or job_is_over(run_directory):
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _start(directory: Path, recorded: bool) -> None:
    words = [sys.executable, "-P", "-m", "mpwatch.hub_process", str(directory)]
    words += [] if recorded else ["--no-record"]
    log = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    os.posix_spawn(
        sys.executable,
        words,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(directory / rendezvous.HUB_LOG_FILE), log, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
