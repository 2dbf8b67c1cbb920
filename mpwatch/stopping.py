"""Stops a job at once, whoever is left of its supervisors; called by screens and verbs.

The keeper is asked through its file of requests: it knows the grace and sees the end. Where it is
gone, the script gets the signal from here, after proof that it is the same process. Never raises.
"""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

from mpwatch import rendezvous
from mpwatch.runs import Run, keeper_lives, read_run
from mpwatch.vocabulary import clean_text


def stop_now(run_directory: Path) -> str:
    """Ask for the end of the job now; returns what was done, in words.

    SIGTERM to the script's main process; where the keeper lives, SIGKILL after its grace.
    """
    run = read_run(run_directory)
    if run is None:
        return "there is no run"
    if run.ended or (run.attempts and run.attempts[-1].ended):
        return "the script has ended already"
    host = rendezvous.foreign_host(run.info)
    if host is not None:
        return f"the job runs on {clean_text(host, 60)}; it can be stopped only there"
    if keeper_lives(run):
        return _ask_keeper(run)
    done, sent = _signal_script(run)
    return f"the keeper is gone: {done}" if sent else done


def _ask_keeper(run: Run) -> str:
    line = json.dumps({"request": "stop_now"}) + "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(run.directory / rendezvous.REQUESTS_FILE, flags, 0o600)
        try:
            if os.write(descriptor, line.encode()) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        done, sent = _signal_script(run)
        after = " from here; no SIGKILL will follow" if sent else ""
        return f"the keeper cannot be asked ({error.strerror}): {done}{after}"
    grace = _grace(run.info)
    return "asked the keeper to stop the script: SIGTERM" + (
        "" if grace is None else f", SIGKILL after {grace:g} s"
    )


def _grace(info: dict[str, Any]) -> float | None:
    settings = info.get("settings")
    grace = settings.get("grace") if isinstance(settings, dict) else None
    return grace if isinstance(grace, int | float) else None


def _signal_script(run: Run) -> tuple[str, bool]:
    """What was done, and whether a signal was sent."""
    last = run.attempts[-1] if run.attempts else None
    if last is None or last.pid is None or last.start_time is None:
        return "the script's process is not known", False
    named = f"the script (process {last.pid})"
    try:
        # Held before it is looked at: the number cannot become another process meanwhile.
        process = os.pidfd_open(last.pid)
    except OSError:
        return f"{named} has ended already", False
    try:
        if not rendezvous.is_alive(last.pid, last.start_time):
            return f"{named} has ended already", False
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError as error:
        return f"{named} cannot be signalled: {error.strerror}", False
    finally:
        os.close(process)
    return f"sent SIGTERM to {named}", True
