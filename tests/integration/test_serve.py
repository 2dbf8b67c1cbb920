"""`watch(serve=True)` in a script started by plain python: a run like any other appears."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_runs import plain_environment
from tests.support.cli_runs import until
from tests.support.forge import Forge

SCRIPT = """
import sys, torch
from mpwatch_agent import watch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watch(optimizer, serve=True, name="served") as job:
    for _ in job.batches(range(7)):
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if len(sys.argv) > 1:
        raise RuntimeError("the script's own")
print("done", job.steps)
"""


def show(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "mpwatch", "show", "served", "--json"]
    done = subprocess.run(
        command, cwd=directory, env=plain_environment(), capture_output=True, check=True
    )
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize(
    ("arguments", "code", "state"), [([], 0, "finished"), (["fail"], 1, "crashed")]
)
def test_a_served_run_is_recorded(
    tmp_path: Path, forge: Forge, arguments: list[str], code: int, state: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = forge.run(script, tmp_path, *arguments, specification=None, cwd=tmp_path)
    assert run.wait() == code, run.communicate()
    assert run.communicate()[0] == (b"" if code else b"done 7\n")

    # Its keeper notes the end a moment later.
    def ended() -> dict[str, Any] | None:
        shown = show(tmp_path)
        return shown if shown["state"] == state else None

    shown = until(ended, f"state {state}")
    assert (shown["name"], shown["steps"], shown["applied"]) == ("served", 7, 7)
