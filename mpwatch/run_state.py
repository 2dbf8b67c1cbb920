"""What a run's state is: decided from what the keeper wrote and what the agent said.

Pure. The keeper's entries are facts about the process; `Evidence` is what events told of the
training inside. Neither alone is enough: exit code 0 may be a script that never trained.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mpwatch.vocabulary import State, is_out_of_memory

# A shell that ran the script passes a death by signal on as 128 + n.
_BY_CODE: Final = {
    128 + number: number.name
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
}
# What an uncaught end looks like when it was asked for; torchrun raises the last.
_ENDS_OF_SIGNALS: Final = (None, "KeyboardInterrupt", "SystemExit", "SignalException")


class Evidence(NamedTuple):
    """What the agent's events and files told. `bound`: some process made an optimizer.

    `bound` None: nobody can know, because neither a record nor the agent's files are there.
    """

    bound: bool | None = None
    steps: int | None = None
    stopping: str | None = None
    error_type: str | None = None
    error: str | None = None
    paused: bool = False
    stalled: bool = False
    exited: bool = False


class Attempt(NamedTuple):
    """One start of the script, as the keeper saw it. `signal` is a name such as "SIGTERM"."""

    n: int
    started_at: float | None = None
    pid: int | None = None
    start_time: int | None = None
    ended: bool = False
    ended_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    by: str | None = None


def attempts_of(entries: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts in the keeper's entries; entries that make no sense are passed over."""
    attempts: dict[int, Attempt] = {}
    for entry in entries:
        event = entry.get("event")
        number = entry.get("attempt")
        if event not in ("spawned", "exited") or not isinstance(number, int):
            continue
        attempt = attempts.get(number, Attempt(number))
        if event == "spawned":
            attempts[number] = attempt._replace(
                started_at=_number(entry.get("time")),
                pid=_whole(entry.get("pid")),
                start_time=_whole(entry.get("start_time")),
            )
        else:
            attempts[number] = attempt._replace(
                ended=True,
                ended_at=_number(entry.get("time")),
                exit_code=_whole(entry.get("code")),
                signal=_text(entry.get("signal")),
                cause=_text(entry.get("cause")),
                by=_text(entry.get("by")),
            )
    return [attempts[number] for number in sorted(attempts)]


def ended_state(attempt: Attempt, evidence: Evidence) -> State:
    """The state of a run whose last attempt ended."""
    if attempt.cause == "stop_now":
        return "stopped"
    if attempt.cause == "served":
        # Nobody's child: what the agent said last is all there is.
        return _served_state(evidence)
    if attempt.exit_code == 0:
        if evidence.bound is False:
            return "never_trained"
        return "stopped" if evidence.stopping not in (None, "max_steps") else "finished"
    died_of = attempt.signal or _BY_CODE.get(attempt.exit_code or 0)
    if died_of == "SIGKILL":
        return "oom" if attempt.cause == "oom_kill" else "killed"
    if died_of == "SIGTERM" and evidence.stopping and attempt.cause is None:
        # The script swallowed the agent's SystemExit until that sent SIGTERM.
        return "stopped" if evidence.stopping not in (None, "max_steps") else "finished"
    asked = died_of or (attempt.by if _obeyed(attempt, evidence) else None)
    if asked == "SIGINT":
        return "stopped"
    if asked in ("SIGTERM", "SIGHUP"):
        return "preempted"
    return "oom" if _out_of_memory(evidence) else "crashed"


def _served_state(evidence: Evidence) -> State:
    if evidence.error_type:
        return "oom" if _out_of_memory(evidence) else "crashed"
    if not evidence.exited:
        return "lost"
    return "stopped" if evidence.stopping not in (None, "max_steps") else "finished"


def live_state(evidence: Evidence) -> State:
    """The state of a run whose script lives."""
    if evidence.paused:
        return "paused"
    if evidence.stalled:
        return "stalled"
    return "starting" if evidence.bound is False else "running"


def cause_of(attempt: Attempt, evidence: Evidence, last: bool) -> str | None:
    """Why an attempt ended, in words; None while it runs, and for a plain exit 0.

    `evidence` speaks of the last attempt only.
    """
    if not attempt.ended:
        return None
    if attempt.cause == "not_started":
        return "the command could not be started"
    if attempt.cause == "stop_now":
        return "stopped by request"
    if attempt.cause == "served":
        return evidence.error_type or evidence.stopping
    if attempt.cause == "oom_kill":
        return "killed by the kernel: out of memory"
    if last and attempt.exit_code == 0:
        return evidence.stopping
    if attempt.signal is not None:
        return f"died of {attempt.signal}"
    if _obeyed(attempt, evidence):
        return f"exit code {attempt.exit_code} after {attempt.by}"
    if last and evidence.error_type and attempt.exit_code:
        return f"{evidence.error_type}: {evidence.error}" if evidence.error else evidence.error_type
    return f"exit code {attempt.exit_code}" if attempt.exit_code else None


def _obeyed(attempt: Attempt, evidence: Evidence) -> bool:
    """Whether a signal made the script end with a code of its own, rather than an error."""
    return attempt.cause == "signalled" and evidence.error_type in _ENDS_OF_SIGNALS


def _out_of_memory(evidence: Evidence) -> bool:
    return bool(evidence.error_type) and is_out_of_memory(
        evidence.error_type or "", evidence.error or ""
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
