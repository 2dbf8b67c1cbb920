"""Learning-rate rules against published numbers, and a script that writes its own rate."""

import json
from pathlib import Path

import pytest
import torch

from mpwatch_agent import rates
from mpwatch_agent.schedules import length_of
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

BATCHES = (32, 128, 465, 1860)
# For a recipe of 16 samples and a noise scale of 465, by the formulas of the papers.
VECTORS = {
    "linear": (2, 8, 29.06, 116.25),
    "sqrt": (1.414, 2.828, 5.391, 10.782),
    "adascale": (1.9356, 6.4890, 15.0313, 24.05),
    "none": (1, 1, 1, 1),
}

WRITES_ITS_OWN = """
import torch
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=1.0)
seen = []
for index in range(8):
    for group in optimizer.param_groups:
        group["lr"] = 0.5 / (1 + index)
    weight[index].backward()
    optimizer.step()
    seen.append(optimizer.param_groups[0]["lr"] == 0.5 / (1 + index))
    optimizer.zero_grad()
print(seen.count(True), *weight.tolist())
"""


@pytest.mark.parametrize("rule", VECTORS)
def test_factors_are_the_published_ones(rule: str) -> None:
    got = [rates.factor(rule, batch / 16, 16, 465) for batch in BATCHES]
    assert got == pytest.approx(VECTORS[rule], rel=3e-4)
    assert rates.factor(rule, 1, 16, 465) == 1


def test_auto_follows_what_is_known() -> None:
    assert rates.resolved("auto", "AdamW", None) == "sqrt"
    assert rates.resolved("auto", "SGD", None) == "linear"
    assert rates.resolved("auto", "SGD", 465.0) == "adascale"
    with pytest.raises(ValueError, match="noise-scale"):
        rates.factor("adascale", 4, 16, None)


def test_a_ramp_ends_where_the_rule_says() -> None:
    ramp = rates.Ramp(4)
    ramp.start_at(1.0)
    assert [ramp.next(3.0) for _ in range(6)] == [1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert [ramp.next(1.0) for _ in range(4)] == [2.5, 2.0, 1.5, 1.0]
    assert rates.Ramp(0).next(5.0) == 5.0


def test_a_script_finds_the_rate_that_it_wrote(tmp_path: Path, forge: Forge) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRITES_ITS_OWN)
    spec = specification(tmp_path, accumulate=4, lr_rule="linear")
    with listening(tmp_path) as listener:
        run = forge.run(script, tmp_path, specification=spec)
        listener.follow(run)
    stdout, stderr = run.communicate()
    assert stderr == b""
    found = json.loads("[" + stdout.decode().strip().replace(" ", ",") + "]")
    # The real steps are the fourth and the eighth: their rates, times four, over four.
    assert found == pytest.approx([8, *[-0.5 / 4] * 4, *[-0.5 / 8] * 4])
    assert [step.learning_rates for step in listener.steps()] == [(0.5,), (0.25,)]


def test_where_a_schedule_ends() -> None:
    schedulers = torch.optim.lr_scheduler

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    one = optimizer()
    warm_up = schedulers.LinearLR(one, 0.1, total_iters=5)
    cosine = schedulers.CosineAnnealingLR(one, 95)
    assert length_of(schedulers.SequentialLR(one, [warm_up, cosine], [5])) == 100
    assert length_of(warm_up) is None
    assert length_of(schedulers.LinearLR(optimizer(), 1.0, 0.1, 50)) == 50
    assert length_of(schedulers.MultiStepLR(optimizer(), [3, 9])) == 9
    assert length_of(schedulers.OneCycleLR(optimizer(), 0.1, total_steps=77)) == 77
    assert length_of(schedulers.StepLR(optimizer(), 3)) is None
