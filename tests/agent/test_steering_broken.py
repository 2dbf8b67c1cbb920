"""Every part that steers raising in turn: the loop is given back, and no step was a wrong one."""

import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mpwatch.events import HookDisabled, PrecisionRefused, ScalerRefused
from tests.support import agent_runs

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PRECISION = {
    "precision": "O1:fp16",
    "scaler": "torch",
    "init_scale": 1024.0,
    "growth_interval": "1000",
}


def run_all(directory: Path, script: str, settings: dict[str, Any], cases: list[str]) -> list[Any]:
    """(code, stdout, stderr, events) of each case."""
    with ExitStack() as stack:
        listeners = []
        for index in range(len(cases)):
            (directory / str(index)).mkdir()
            listeners.append(stack.enter_context(agent_runs.listening(directory / str(index))))
        words = [str(SUPPORT / script), json.dumps(settings), str(directory), *cases]
        command = [sys.executable, "-m", "tests.support.broken_steering", *words]
        root = SUPPORT.parents[1]
        subprocess.run(command, env=agent_runs.plain_environment(), check=True, cwd=root)
        for listener in listeners:
            listener.drain(0.05)
    texts = [
        [(directory / str(index) / name).read_text() for name in ("code", "stdout", "stderr")]
        for index in range(len(cases))
    ]
    return [(*text, listener) for text, listener in zip(texts, listeners, strict=True)]


def values(stdout: str) -> list[float]:
    """All weights that the script printed."""
    return [value for tensor in json.loads(stdout.splitlines()[1]) for value in tensor]


def test_precision_that_fails_leaves_the_loop_right(tmp_path: Path) -> None:
    names = [
        "steering at backward",
        "steering after backward",
        "steering at whole gradients",
        "steering at step",
        "steering at a root",
        "steering at a root's forward",
        "steering after a root's forward",
        "steering once the loop is known",
    ]
    # In the middle of the run, where they come that often.
    once = ("steering at a root", "steering once the loop is known")
    cases = [f"{name}#{1 if name in once else 6}" for name in names]
    cases += ["steering at backward#1", "steering at a root's forward#1"]
    script = "precision_loop.py gentle none 0 values"
    plain, *broken = run_all(
        tmp_path, script, PRECISION, ["unwatched", *cases, "unscale#3", "unscale#always"]
    )
    expected = values(plain[1])
    for case, (code, stdout, stderr, listener) in zip(
        [*cases, "unscale#3", "unscale#always"], broken, strict=True
    ):
        assert code == "0", (case, stderr)
        # A step on gradients that are still scaled would be 1024 times too large, one on gradients
        # divided twice as good as none: up to 0.06. Where nothing can be unscaled one is skipped.
        apart = 0.1 if "always" in case else 0.004
        assert values(stdout) == pytest.approx(expected, abs=apart), case
        refused = listener.of(PrecisionRefused)
        assert len(refused) == 1, case
        assert "on purpose" in refused[0].reason, case
        assert len(listener.of(HookDisabled)) >= 1, case
        assert refused[0].reason in stderr, case
        assert len(listener.steps()) == 24, case


def test_an_overflow_is_not_stepped_on_when_steering_fails_at_it(tmp_path: Path) -> None:
    names = ["steering at whole gradients", "steering at step"]
    # Windows 10 and 11 overflow; the tenth call of each comes in window 10.
    cases = [f"{name}#10" for name in names] + ["unscale#19"]
    script = "precision_loop.py gentle none 0 values overflow_once"
    for case, (code, stdout, stderr, listener) in zip(
        cases, run_all(tmp_path, script, PRECISION, cases), strict=True
    ):
        assert code == "0", (case, stderr)
        assert stdout.splitlines()[0].endswith("True"), case
        assert [step.step for step in listener.steps() if not step.applied] == [10], case


def test_a_policy_that_fails_leaves_the_scaler_to_torch(tmp_path: Path) -> None:
    names = [
        "steering at scale",
        "steering into update",
        "steering after update",
        "steering at whole gradients",
    ]
    cases = [f"{name}#40" for name in names]
    settings = {"scaler": "doubling", "init_scale": 1024.0}
    plain, *broken = run_all(tmp_path, "scaler_loop.py one 80", settings, ["unwatched", *cases])
    found = json.loads(plain[1])
    for case, (code, stdout, _, listener) in zip(cases, broken, strict=True):
        assert code == "0", case
        mine = json.loads(stdout)
        # The loss does not care for the scale: what is skipped and what is not, is the same.
        assert mine["changed"] == found["changed"], case
        assert mine["weights"] == found["weights"], case
        (refused,) = listener.of(ScalerRefused)
        assert "given back" in refused.reason, case
        # From there on torch's own rule: four clean windows in a row do not double it.
        doubled = [after == 2 * scale for scale, after in pairwise(mine["scales"][-20:])]
        assert sum(doubled) <= 4, case
