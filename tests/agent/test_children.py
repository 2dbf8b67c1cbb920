"""Forked and spawned children of a watched script are silent; only one process is the rank."""

import os
from pathlib import Path

import pytest

from mpwatch.events import AgentBound, AgentExited, WindowDiscarded
from tests.support.agent_runs import INJECT, SOURCES, listening, specification, start
from tests.support.forge import Forge

FORKS = """
import os, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(n):
    for _ in range(n):
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train(3)
for _ in range(20):
    child = os.fork()
    if child == 0:
        train(2)
        sys.exit(0) if os.getpid() % 2 else os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
train(3)
"""

ENVIRONMENT = """
import os, subprocess, sys
def seen():
    return sorted(k for k in os.environ if "MPWATCH" in k), os.environ.get("PYTHONPATH", "")
before = seen()
print(sys.modules["sitecustomize"].MINE)
import torch
assert seen() == before
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(seen())
print("mpwatch" in " ".join(sys.path[:1]), [p for p in sys.path if p.endswith("inject")])
child = "import sys; print('mpwatch_agent.entry' in sys.modules)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout, end="")
print(before[0], "inject" in before[1])
"""


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_forked_children_say_nothing_and_harm_nothing(tmp_path: Path, forge: Forge) -> None:
    script = write(tmp_path, "forks.py", FORKS)
    with listening(tmp_path) as listener:
        process = forge.run(script, tmp_path, specification=specification(tmp_path))
        listener.follow(process)
    assert (process.returncode, process.communicate()) == (0, (b"", b""))
    assert len(listener.of(AgentBound)) == len(listener.of(AgentExited)) == 1
    assert [step.step for step in listener.steps()] == [1, 2, 3, 4, 5, 6]
    sequences = [frame.sequence for frame, _ in listener.events]
    assert sequences == list(range(len(sequences)))


def test_a_second_process_of_the_same_rank_stays_silent(tmp_path: Path, forge: Forge) -> None:
    script = write(tmp_path, "loop.py", FORKS.replace("range(20)", "range(0)"))
    lock = tmp_path / "rank-1-0"
    with listening(tmp_path) as listener:
        from mpwatch import rendezvous

        held = rendezvous.try_lock(lock)
        assert held is not None
        process = forge.run(script, tmp_path, specification=specification(tmp_path))
        listener.follow(process)
        os.close(held)
    assert (process.returncode, process.communicate()) == (0, (b"", b""))
    assert listener.events == []


def test_processes_of_one_rank_one_after_the_other_go_on_counting(
    tmp_path: Path, forge: Forge
) -> None:
    """A launcher that restarts its worker: steps and sequence numbers continue."""
    script = write(tmp_path, "loop.py", FORKS.replace("range(20)", "range(0)"))
    with listening(tmp_path) as listener:
        for _ in range(2):
            process = forge.run(script, tmp_path, specification=specification(tmp_path))
            listener.follow(process)
    assert [step.step for step in listener.steps()] == list(range(1, 13))
    assert [bound.process for bound in listener.of(AgentBound)] == [0, 1]
    sequences = [frame.sequence for frame, _ in listener.events]
    assert sequences == sorted(set(sequences))


def test_the_environment_is_restored_when_bound_and_the_next_sitecustomize_has_its_turn(
    tmp_path: Path,
) -> None:
    write(tmp_path, "sitecustomize.py", "MINE = 'the script has its own'\n")
    script = write(tmp_path, "environment.py", ENVIRONMENT)
    path = os.pathsep.join([str(INJECT), SOURCES, str(tmp_path)])
    with listening(tmp_path) as listener:
        process = start(script, tmp_path, environment={"PYTHONPATH": path})
        listener.follow(process)
        stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, b"")
    assert stdout.decode().splitlines() == [
        "the script has its own",
        f"([], '{SOURCES}')",
        "False []",
        "False",
        "['_MPWATCH_AGENT'] True",
    ]
    assert len(listener.of(AgentBound)) == 1


def test_the_last_step_counts_though_no_update_follows(tmp_path: Path, forge: Forge) -> None:
    script = write(
        tmp_path,
        "no_update.py",
        """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(3):
    scaler.scale(model(torch.ones(3, 2)).mean()).backward()
    scaler.step(optimizer)
    if step < 2:
        scaler.update()
    optimizer.zero_grad()
""",
    )
    with listening(tmp_path) as listener:
        process = forge.run(script, tmp_path, specification=specification(tmp_path))
        listener.follow(process)
    assert process.returncode == 0
    assert [(step.step, step.loss_scale_after) for step in listener.steps()] == [
        (1, 4.0),
        (2, 4.0),
        (3, None),
    ]
    assert listener.of(AgentExited)[0].windows_open == 0


def test_a_window_the_script_gave_up_after_unscaling(tmp_path: Path, forge: Forge) -> None:
    """Hand-written finiteness checks: the next window is seen whole again."""
    script = write(
        tmp_path,
        "gives_up.py",
        """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(6):
    loss = model(torch.ones(3, 2)).mean() * (float("inf") if step == 2 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        scaler.update()
        optimizer.zero_grad()
        continue
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(float(norm).hex())
""",
    )
    with listening(tmp_path) as listener:
        settings = {"grad_norm_every": 1}
        process = forge.run(script, tmp_path, specification=specification(tmp_path, **settings))
        listener.follow(process)
    norms = [float.fromhex(line) for line in process.communicate()[0].decode().split()]
    steps = listener.steps()
    assert [step.applied for step in steps] == [True] * 5
    assert [event.after_step for event in listener.of(WindowDiscarded)] == [2]
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-5)
    assert all(step.phase_s["optimizer"] > 0 for step in steps)
