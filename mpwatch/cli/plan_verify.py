"""`plan --verify SCRIPT`: run a few steps under the agent and read what they took.

Starts `mpwatch run` as a child and reads `mpwatch show latest --json`; this module knows of a run
only what that documented JSON says.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mpwatch.cli.plan_comparison import whole_micro_batch
from mpwatch.errors import UsageError

MOST_STEPS = 10_000


def _mpwatch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mpwatch.cli.main", *arguments]


def check(script: Sequence[str], steps: int) -> None:
    """Refuse early what could not be run, before anything is planned.

    Raises:
        UsageError: no script, or an absurd number of steps.
    """
    if not script:
        raise UsageError("--verify needs a script: --verify train.py [ARGS], as the last option")
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--verify-steps {steps} is out of range: 1 to {MOST_STEPS}")
    if not script[0].startswith("-") and not os.path.exists(script[0]):
        raise UsageError(f"--verify: no script {script[0]}")


def measure(script: Sequence[str], steps: int) -> tuple[dict[str, Any], int | None]:
    """Run the script for some steps; returns its summary and its micro-batch, None if unknown.

    Raises:
        UsageError: the run failed or left no summary; that says nothing about what fits.
    """
    run = subprocess.run(
        _mpwatch("run", "--headless", "--max-steps", str(steps), *script), stdout=subprocess.PIPE
    )
    if run.returncode:
        raise UsageError(f"--verify: {script[0]} ended with exit code {run.returncode}")
    shown = subprocess.run(_mpwatch("show", "latest", "--json"), stdout=subprocess.PIPE)
    try:
        summary = json.loads(shown.stdout)
    except ValueError as error:
        raise UsageError("--verify: the run left no summary (mpwatch show latest)") from error
    if not isinstance(summary, dict):
        raise UsageError("--verify: the run's summary is no object")
    return summary, _micro_batch(summary)


def _micro_batch(summary: dict[str, Any]) -> int | None:
    """Samples per micro-batch in the last step that tells both; the summary has no such key."""
    run = str(summary.get("run_id"))
    told = subprocess.run(_mpwatch("tail", run, "--json", "--no-follow"), stdout=subprocess.PIPE)
    for line in reversed(told.stdout.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("kind") == "step_finished":
            return whole_micro_batch(event.get("samples"), event.get("micro_batches"))
    return None
