"""`--scaler` on a script with its own GradScaler: the policy is ours, all else is torch's."""

import json
from pathlib import Path
from typing import Any

import pytest

from mpwatch.events import (
    AgentStopping,
    HookDisabled,
    ScaleLimitReached,
    ScalerRefused,
    ScalerReplaced,
)
from mpwatch_agent.scaler_presets import policy_of
from mpwatch_agent.scaling import LossScaler
from tests.support.agent_runs import Listener, listening, specification
from tests.support.cli_runs import until
from tests.support.forge import Forge

SUPPORT = Path(__file__).resolve().parents[1] / "support"
LOOP = SUPPORT / "scaler_loop.py"


def watched(
    forge: Forge, directory: Path, script: Path, *arguments: str, **settings: Any
) -> tuple[Listener, str, str]:
    """(events, stdout, stderr) of a run that ended well."""
    with listening(directory) as listener:
        given = specification(directory, **settings)
        run = forge.run(script, directory, *arguments, specification=given)
        listener.follow(run)
    stdout, stderr = (text.decode() for text in run.communicate())
    assert run.returncode == 0, stderr
    assert listener.of(HookDisabled) == []
    return listener, stdout, stderr


def unwatched(forge: Forge, directory: Path, script: Path, *arguments: str) -> str:
    directory.mkdir()
    run = forge.run(script, directory, *arguments, specification=None)
    until(lambda: run.poll() is not None, "the end of the plain run")
    assert run.returncode == 0, run.communicate()[1].decode()
    return run.communicate()[0].decode()


@pytest.mark.parametrize("kind", ["one", "fused", "several"])
def test_torch_preset_changes_nothing(kind: str, forge: Forge, tmp_path: Path) -> None:
    words = (kind, "600", "reload")
    knobs = {"scaler": "torch", "init_scale": 1024.0, "growth_interval": "5"}
    listener, stdout, _ = watched(forge, tmp_path, LOOP, *words, **knobs)
    plain = unwatched(forge, tmp_path / "plain", LOOP, *words)
    assert stdout == plain
    found = json.loads(stdout)
    assert 0.05 < sum(c == [0] * len(c) or 0 in c for c in found["changed"]) / 600 < 0.5
    for index in range(len(found["changed"][0])):
        steps = listener.steps(index)
        # Applied or skipped is what the weights did, for the fused optimizer as well.
        assert [step.applied for step in steps] == [bool(c[index]) for c in found["changed"]]
        assert [step.loss_scale_after for step in steps] == found["scales"]
    replaced = listener.of(ScalerReplaced)
    assert [(e.policy, e.replaced) for e in replaced] == [("torch", "GradScaler")] * 2
    assert replaced[0].knobs["growth_interval"] == 5


@pytest.mark.parametrize("name", ["deepspeed", "doubling", "fairseq"])
def test_another_policy_decides_the_scale(name: str, forge: Forge, tmp_path: Path) -> None:
    interval = 1 if name == "doubling" else 7
    knobs = {"scaler": name, "growth_interval": str(interval)}
    listener, stdout, stderr = watched(forge, tmp_path, LOOP, "one", "300", **knobs)
    found = json.loads(stdout)
    # Which windows overflowed is what torch's own check said; the scale is the policy's.
    ours = LossScaler(policy_of(name, growth_interval=interval, interval_unit="windows"))
    expected = [ours.update(not changed[0]).after for changed in found["changed"]]
    assert found["scales"] == expected
    assert found["state"]["scale"] == expected[-1]
    assert found["state"]["_growth_tracker"] == ours.clean_windows
    (event,) = listener.of(ScalerReplaced)
    assert event.loss_scale == policy_of(name).init_scale
    steps = listener.steps()
    assert steps[0].loss_scale_before == policy_of(name).init_scale
    assert [step.loss_scale_after for step in steps] == expected
    # One window in 7 + 1 once it has come to rest.
    share = "50%" if name == "doubling" else "12%"
    assert f"about {share} of steps will be skipped" in stderr


def test_limits_are_told_and_can_end_the_run(forge: Forge, tmp_path: Path) -> None:
    limits = {"scale_floor": 64.0, "at_floor": "stop", "init_scale": 256.0}
    listener, stdout, stderr = watched(
        forge, tmp_path, LOOP, "one", "400", scaler="torch", growth_interval="1000", **limits
    )
    assert stdout == ""
    reached = [(event.limit, event.action) for event in listener.of(ScaleLimitReached)]
    assert reached == [("floor", "warn"), ("floor", "stop")]
    assert [event.reason for event in listener.of(AgentStopping)] == ["loss scale at its floor"]
    last = listener.steps()[-1]
    assert (last.applied, last.loss_scale_after) == (False, 64.0)
    assert "at its floor" in stderr


def test_without_a_scaler_it_is_refused_by_name(forge: Forge, tmp_path: Path) -> None:
    script = SUPPORT / "precision_loop.py"
    listener, stdout, stderr = watched(forge, tmp_path, script, "sgd", "none", scaler="apex")
    (refused,) = listener.of(ScalerRefused)
    assert "no GradScaler" in refused.reason
    assert "--precision" in refused.reason
    assert f"scaler apex is not used: {refused.reason}" in stderr
    assert stdout == unwatched(forge, tmp_path / "plain", script, "sgd", "none")


SCALE_OF_ZERO = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
for index in range(6):
    scaler.scale((weight**2).sum()).backward()
    scaler.step(optimizer)
    # What an endless row of overflows ends in, where nothing keeps the scale from it.
    scaler.update(0.0 if index == 2 else None)
    optimizer.zero_grad()
print(weight.isfinite().all().item())
"""


def test_a_scale_of_zero_harms_torch_and_not_ours(forge: Forge, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCALE_OF_ZERO)
    listener, stdout, _ = watched(forge, tmp_path, script, scaler="torch")
    assert unwatched(forge, tmp_path / "plain", script) == "False\n"
    assert stdout == "True\n"
    assert min(step.loss_scale_after for step in listener.steps()) == 2.0**-126
