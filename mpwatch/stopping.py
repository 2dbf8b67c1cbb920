"""Stops a job at once, whoever is left of its supervisors; called by screens and verbs.

The keeper is asked through its file of requests: it knows the grace and sees the end. Where it is
gone, the script gets the signal from here, after proof that it is the same process. Never raises.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from mpwatch import rendezvous
from mpwatch.runs import Run, keeper_lives, read_run


def stop_now(run_directory: Path) -> str:
    """Ask for the end of the job now; returns what was done, in words.

    SIGTERM to the script's main process; where the keeper lives, SIGKILL after its grace.
    """
    run = read_run(run_directory)
    if run is None:
        return "there is no run"
    if run.ended or (run.attempts and run.attempts[-1].ended):
        return "the script has ended already"
    if keeper_lives(run):
        return _ask_keeper(run)
    return _signal_script(run)


def _ask_keeper(run: Run) -> str:
    line = json.dumps({"request": "stop_now"}) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(run.directory / rendezvous.REQUESTS_FILE, flags, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"the keeper cannot be asked ({error.strerror}); {_signal_script(run)}"
    grace = _grace(run.info)
    return "asked the keeper to stop the script: SIGTERM" + (
        "" if grace is None else f", SIGKILL after {grace:g} s"
    )


def _grace(info: dict[str, Any]) -> float | None:
    settings = info.get("settings")
    grace = settings.get("grace") if isinstance(settings, dict) else None
    return grace if isinstance(grace, int | float) else None


def _signal_script(run: Run) -> str:
    last = run.attempts[-1] if run.attempts else None
    if last is None or last.pid is None or last.start_time is None:
        return "the script's process is not known"
    try:
        # Held before it is looked at: the number cannot become another process meanwhile.
        process = os.pidfd_open(last.pid)
    except OSError:
        return f"the script (process {last.pid}) has ended already"
    try:
        if not rendezvous.is_alive(last.pid, last.start_time):
            return f"the script (process {last.pid}) has ended already"
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError as error:
        return f"the script (process {last.pid}) cannot be signalled: {error.strerror}"
    finally:
        os.close(process)
    return f"the keeper is gone: sent SIGTERM to the script (process {last.pid})"
