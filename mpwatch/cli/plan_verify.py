"""`plan --verify SCRIPT`: run a few steps under the agent and set predicted against measured.

Starts `mpwatch run` as a child and reads `mpwatch show latest --json`; this module knows of a run
only what that documented JSON says.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpwatch.errors import MpwatchError
from mpwatch.planner.plans import Plan
from mpwatch.planner.units import format_bytes, format_seconds

PHASES = ("forward", "backward", "optimizer")
WHOLE_PROCESS = ("resident", "rss")
"""Kinds of reading that hold more than tensors."""


def _mpwatch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mpwatch.cli.main", *arguments]


def measure(script: Sequence[str], steps: int) -> dict[str, Any]:
    """Run the script for some steps and return its summary.

    Raises:
        MpwatchError: the run failed or left no summary.
    """
    run = subprocess.run(
        _mpwatch("run", "--headless", "--max-steps", str(steps), *script), stdout=subprocess.PIPE
    )
    if run.returncode:
        raise MpwatchError(f"--verify: {script[0]} ended with exit code {run.returncode}")
    shown = subprocess.run(_mpwatch("show", "latest", "--json"), stdout=subprocess.PIPE)
    try:
        summary = json.loads(shown.stdout)
    except ValueError as error:
        raise MpwatchError("--verify: the run left no summary (mpwatch show latest)") from error
    if not isinstance(summary, dict):
        raise MpwatchError("--verify: the run's summary is no object")
    return summary


def _measured_bytes(summary: Mapping[str, Any], phase: str) -> tuple[float | None, str]:
    """(peak bytes, what kind of reading it is) of one phase; None is unknown."""
    found = (summary.get("memory_bytes") or {}).get(phase) or {}
    return found.get("peak"), str(found.get("kind") or "unknown")


def _measured_seconds(summary: Mapping[str, Any], phase: str) -> float | None:
    found: float | None = ((summary.get("phase_s") or {}).get(phase) or {}).get("median")
    return found


def comparison(plan: Plan, summary: Mapping[str, Any]) -> list[str]:
    """One line per phase: predicted, measured, difference; what is unknown says so."""
    ran = summary.get("accumulation_steps", "unknown")
    lines = [
        f"run {summary.get('run_id', 'unknown')}: accumulation_steps {ran},"
        f" planned {plan.accumulation_steps}"
        + ("" if ran == plan.accumulation_steps else ": the script decided otherwise")
    ]
    label = plan.labels["peak_bytes"]
    for phase in PHASES:
        predicted = plan.phase_bytes.get(phase)
        measured, kind = _measured_bytes(summary, phase)
        seconds = _measured_seconds(summary, phase)
        known = f"{format_bytes(predicted)} ({label})" if predicted else "unknown"
        text = f"{phase:9} predicted {known}"
        if measured is None:
            text += ", measured unknown"
        else:
            text += f", measured {format_bytes(measured)} [{kind}]"
            if kind in WHOLE_PROCESS:
                text += " (interpreter and libraries included: no difference is taken)"
            elif predicted:
                text += f" ({(predicted - measured) / measured:+.1%})"
        text += f", {format_seconds(seconds)} measured" if seconds else ", time unknown"
        lines.append(text)
    return lines
