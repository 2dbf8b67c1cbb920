"""`show --plan`: a run that was started with a plan, compared with it later."""

import json
from pathlib import Path

import pytest

from tests.support.cli_runs import Place
from tests.support.forge import Forge

SCRIPT = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
for step in range(3):
    for micro in range(2):
        (model(torch.randn(4, 8)).pow(2).mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAN = """
[plan]
precision = "O0"
accumulation_steps = 4
micro_batch = 4
peak_bytes = 2000
label = "tracked"
phase_bytes = { forward = 1000, backward = 2000 }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Place:
    place = Place(tmp_path_factory.mktemp("plan"))
    place.script(SCRIPT)
    Path(place.directory / "plan.toml").write_text(PLAN)
    place.script("print('no training')", "plain.py")
    for name, words in (
        ("planned", ["--config", "plan.toml", *forge.interpreter, "script.py"]),
        ("plain", ["plain.py"]),
    ):
        assert place.mpwatch("run", "--headless", "--name", name, *words).returncode == 0
    place.none_left()
    return place


def test_predicted_stands_beside_measured(place: Place) -> None:
    done = place.mpwatch("show", "planned", "--plan")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert lines[1].endswith("it would take K = 2 times the script's 2")
    assert lines[2] == "micro_batch planned 4, the script's 4: as planned"
    assert "forward   predicted 1.00 kB (tracked), measured" in lines[4]
    assert "interpreter and libraries included" in lines[4]


def test_the_same_as_an_object(place: Place) -> None:
    found = json.loads(place.mpwatch("show", "planned", "--plan", "--json").stdout)
    assert found["plan"]["accumulation_steps"] == 4
    assert [phase["phase"] for phase in found["phases"]] == ["forward", "backward", "optimizer"]
    assert [phase["predicted_bytes"] for phase in found["phases"]] == [1000, 2000, None]
    assert all(phase["difference"] is None for phase in found["phases"])
    assert found["measured_time_per_sample_s"] > 0


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_without_a_plan(place: Place, options: list[str]) -> None:
    done = place.mpwatch("show", "plain", "--plan", *options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == 1
    assert b"was started without a plan" in done.stderr
