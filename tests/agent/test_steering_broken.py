"""Every part that steers raising in turn: the loop is given back, and no step was a wrong one."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpwatch.events import HookDisabled, PrecisionRefused, ScalerRefused
from tests.support import agent_runs
from tests.support.forge import Forge

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PRECISION = {
    "precision": "O1:fp16",
    "scaler": "torch",
    "init_scale": 1024.0,
    "growth_interval": "1000",
}


class Ended(NamedTuple):
    """How a run ended."""

    code: int | None
    stdout: str
    stderr: str
    listener: agent_runs.Listener


def run(forge: Forge, directory: Path, script: str, settings: dict[str, Any], case: str) -> Ended:
    """The script with the part broken that `case` names."""
    # A socket's path is short.
    place = directory / str(len(list(directory.iterdir())))
    place.mkdir()
    with agent_runs.listening(place) as listener:
        words = (str(SUPPORT / script), json.dumps(settings), str(place), case)
        process = forge.run(SUPPORT / "broken_steering.py", place, *words, specification=None)
        listener.follow(process)
    return Ended(process.returncode, *(text.decode() for text in process.communicate()), listener)


def values(stdout: str) -> list[float]:
    """All weights that the script printed."""
    return [value for tensor in json.loads(stdout.splitlines()[1]) for value in tensor]


def test_precision_that_fails_leaves_the_loop_right(tmp_path: Path, forge: Forge) -> None:
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
    expected = values(run(forge, tmp_path, script, PRECISION, "unwatched").stdout)
    for case in [*cases, "unscale#3", "unscale#always"]:
        code, stdout, stderr, listener = run(forge, tmp_path, script, PRECISION, case)
        assert code == 0, (case, stderr)
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


def test_an_overflow_is_not_stepped_on_when_steering_fails_at_it(
    tmp_path: Path, forge: Forge
) -> None:
    names = ["steering at whole gradients", "steering at step"]
    # Windows 10 and 11 overflow; the tenth call of each comes in window 10.
    cases = [f"{name}#10" for name in names] + ["unscale#19"]
    script = "precision_loop.py gentle none 0 values overflow_once"
    for case in cases:
        code, stdout, stderr, listener = run(forge, tmp_path, script, PRECISION, case)
        assert code == 0, (case, stderr)
        assert stdout.splitlines()[0].endswith("True"), case
        assert [step.step for step in listener.steps() if not step.applied] == [10], case


def test_a_policy_that_fails_leaves_the_scaler_to_torch(tmp_path: Path, forge: Forge) -> None:
    names = [
        "steering at scale",
        "steering into update",
        "steering after update",
        "steering at whole gradients",
    ]
    cases = [f"{name}#40" for name in names]
    settings = {"scaler": "doubling", "init_scale": 1024.0}
    script = "scaler_loop.py one 80"
    found = json.loads(run(forge, tmp_path, script, settings, "unwatched").stdout)
    for case in cases:
        code, stdout, _, listener = run(forge, tmp_path, script, settings, case)
        assert code == 0, case
        mine = json.loads(stdout)
        # The loss does not care for the scale: what is skipped and what is not, is the same.
        assert mine["changed"] == found["changed"], case
        assert mine["weights"] == found["weights"], case
        (refused,) = listener.of(ScalerRefused)
        assert "given back" in refused.reason, case
        # From there on torch's own rule: four clean windows in a row do not double it.
        doubled = [after == 2 * scale for scale, after in pairwise(mine["scales"][-20:])]
        assert sum(doubled) <= 4, case
