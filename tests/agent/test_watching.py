"""`watch()` in scripts and notebooks: ends the loop by itself, never piles up, detaches whole."""

from pathlib import Path

import pytest

from mpwatch.events import AgentExited, AgentStopping
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

ENDS_BY_ITSELF = """
import torch
from mpwatch_agent import watch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
with watch(optimizer, max_steps=5) as job:
    for item in job.batches(range(100)):
        seen.append(item)
        for _ in range(2):
            model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_the_step = item
print(seen, after_the_step, job.steps, job.stopping)
"""

NO_PILES = """
import gc, weakref, torch
from torch.utils.data import dataloader
from mpwatch_agent import watch

def replaced():
    return (torch.autograd.backward, torch.optim.Optimizer.__init__, torch.compile,
            torch.optim.Optimizer.profile_hook_step, torch.optim.Optimizer.zero_grad,
            torch.amp.GradScaler.step,
            torch.nn.Module.zero_grad, torch.nn.utils.clip_grad_norm_, torch.jit.script,
            dataloader._BaseDataLoaderIter.__next__)

originals = replaced()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    job = watch(optimizer)
    output = model(torch.ones(3, 2))
    alive = weakref.ref(output)
    output.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("once", [len(h) for h in (model._forward_pre_hooks, model._forward_hooks,
      optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)])
del output
print("held", alive() is not None)
print("steps", job.steps)
job.detach()
job.detach()
print("restored", replaced() == originals)
print("left", [len(h) for h in (model._forward_pre_hooks, model._forward_hooks,
      optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)],
      len(torch.nn.modules.module._global_forward_pre_hooks))
model(torch.ones(3, 2)).mean().backward()
optimizer.step()
print("after", job.steps)
again = watch(optimizer)
model(torch.ones(3, 2)).mean().backward()
optimizer.step()
print("again", again.steps)
"""

BAD = """
from mpwatch_agent import watch
watch(max_steps=0)
"""


def run(forge: Forge, directory: Path, text: str, watched: bool = False) -> tuple[int, str, str]:
    script = directory / "script.py"
    script.write_text(text)
    spec = specification(directory) if watched else None
    process = forge.run(script, directory, specification=spec)
    with listening(directory) as listener:
        listener.follow(process)
    run.events = listener  # type: ignore[attr-defined]
    stdout, stderr = process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "under mpwatch run"])
def test_a_watched_loop_ends_by_itself(tmp_path: Path, forge: Forge, watched: bool) -> None:
    code, stdout, stderr = run(forge, tmp_path, ENDS_BY_ITSELF, watched)
    assert (code, stderr) == (0, "")
    assert stdout == "[0, 1, 2, 3, 4] 4 5 True\n"
    events = run.events  # type: ignore[attr-defined]
    assert len(events.steps()) == (5 if watched else 0)
    assert len(events.of(AgentStopping)) == len(events.of(AgentExited)) == (1 if watched else 0)


def test_called_again_it_is_the_same_watch_and_detaching_leaves_nothing(
    tmp_path: Path, forge: Forge
) -> None:
    code, stdout, stderr = run(forge, tmp_path, NO_PILES)
    assert (code, stderr) == (0, "")
    assert stdout.splitlines() == [
        "once [1, 0, 1, 1]",
        "held False",
        "steps 5",
        "restored True",
        "left [0, 0, 0, 0] 0",
        "after 5",
        "again 1",
    ]


def test_a_bad_limit_is_refused_with_its_value(tmp_path: Path, forge: Forge) -> None:
    code, _, stderr = run(forge, tmp_path, BAD)
    assert code == 1
    assert stderr.splitlines()[-1] == "ValueError: max_steps is 0; it must be 1 or more"
