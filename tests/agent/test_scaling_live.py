"""Scaling by command and in `watch()`; O2 and O3 by what becomes of small updates; on-nonfinite."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpwatch import commands, wire
from mpwatch.events import (
    AgentExited,
    AgentStopping,
    CommandApplied,
    CommandRefused,
    HookDisabled,
    NonfiniteFound,
    OverflowLocated,
    PrecisionApplied,
    ScaleLimitReached,
    ScalerReplaced,
    StepFinished,
)
from tests.support.agent_runs import Listener, listening, specification
from tests.support.cli_runs import until
from tests.support.forge import Forge

# Updates of a hundredth of an ulp of a weight of 1 in 16 bits, a hundred of them.
SMALL_UPDATES = """
import json, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.LayerNorm(1))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-18)
seen = []
def note(module, arguments, output):
    seen.append((str(module.weight.dtype), str(output.dtype)))
model[0].register_forward_hook(note)
for _ in range(100):
    # Every gradient is 1.
    loss = model(torch.ones(4, 1)).sum() * 0 + sum(p.sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = model.state_dict()
print(json.dumps({
    "weight": state["0.weight"].item(), "dtype": str(state["0.weight"].dtype),
    "norm": str(state["1.weight"].dtype), "seen": seen[0],
}))
"""

# Every finite gradient is 4 times the loss scale; in three windows one parameter's is not finite.
KNOWN_GRADIENTS = """
import sys, torch
model = torch.nn.Linear(2, 1)
extra = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.0)
step = 0
extra.register_hook(lambda gradient: gradient * float("inf") if step in (2, 5, 9) else gradient)
for step in range(12):
    (model(torch.ones(4, 2)).sum() + extra.sum()).backward()
    if "clips" in sys.argv:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()
"""

BAD_STEPS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for index in range(8):
    loss = model(torch.ones(2, 3)).pow(2).mean()
    if index == 3:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cat([p.detach().flatten() for p in model.parameters()]).isfinite().all().item())
"""

IN_WATCH = """
import torch
from mpwatch_agent import watch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(24, 8, 4)
from mpwatch_agent.scaler_presets import policy_of
for _ in range(2):
    scaler = policy_of("apex", init_scale=256.0)
    job = watch(optimizer, precision="O1:fp16", scaler=scaler)
try:
    watch(scaler="torch")
except ValueError as error:
    print("refused", str(error)[:20])
skipped = []
for index, x in enumerate(inputs):
    before = [p.detach().clone() for p in model.parameters()]
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    if index in (5, 6):
        loss = loss * float("inf")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if all(torch.equal(a, b) for a, b in zip(before, model.parameters())):
        skipped.append(index)
print("skipped", skipped, "finite", all(p.isfinite().all().item() for p in model.parameters()))
print("parts", len(job._agent.steering.parts))
job.detach()
print("hooks", len(model._forward_pre_hooks), len(model._forward_hooks))
"""


def run(
    forge: Forge, directory: Path, text: str, *arguments: str, **settings: Any
) -> tuple[Listener, str, str]:
    """(events, stdout, stderr) of a script given as text; settings None: without an agent."""
    script = directory / "script.py"
    script.write_text(text)
    with listening(directory) as listener:
        given = specification(directory, **settings) if settings else None
        process = forge.run(script, directory, *arguments, specification=given)
        listener.follow(process)
    stdout, stderr = (words.decode() for words in process.communicate())
    assert process.returncode == 0, stderr
    assert listener.of(HookDisabled) == []
    return listener, stdout, stderr


@pytest.mark.parametrize("mode", ["O2:fp16", "O2:bf16", "O3:bf16", "O3:fp16"])
def test_updates_below_half_an_ulp(mode: str, forge: Forge, tmp_path: Path) -> None:
    listener, stdout, stderr = run(forge, tmp_path, SMALL_UPDATES, precision=mode)
    found = json.loads(stdout)
    half = "torch.float16" if mode.endswith("fp16") else "torch.bfloat16"
    (applied,) = listener.of(PrecisionApplied)
    assert found["seen"][0] == half
    if mode.startswith("O2"):
        # The script's own state dict holds the masters; a hundred small updates add up in them.
        assert (found["dtype"], found["norm"]) == ("torch.float32", "torch.float32")
        assert found["weight"] == pytest.approx(1 - 100 * 2**-18, abs=1e-7)
        assert applied.notes == ()
    else:
        assert (found["dtype"], found["norm"]) == (half, half)
        assert found["weight"] == 1.0
        assert "is lost" in applied.notes[0]
        assert applied.notes[0] in stderr


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_nonfinite_gradients_without_a_scaler(action: str, forge: Forge, tmp_path: Path) -> None:
    listener, stdout, stderr = run(forge, tmp_path, BAD_STEPS, on_nonfinite=action)
    found = listener.of(NonfiniteFound)
    assert found[0].step == 4
    assert {event.action for event in found} == {action}
    steps = listener.steps()
    assert [step.overflow for step in steps[:4]] == [False, False, False, True]
    assert "step 4: gradients are not finite" in stderr
    if action == "warn":
        assert all(step.applied for step in steps)
        assert stdout == "False\n"
        return
    assert [step.step for step in steps if not step.applied] == [4]
    if action == "skip":
        assert (stdout, len(steps), len(found)) == ("True\n", 8, 1)
    else:
        assert stdout == ""
        assert [event.reason for event in listener.of(AgentStopping)] == ["gradients not finite"]


def test_watch_takes_the_same_words(forge: Forge, tmp_path: Path) -> None:
    _, stdout, _ = run(forge, tmp_path, IN_WATCH)
    refused, skipped, parts, hooks = stdout.splitlines()
    assert refused == "refused scaler is Policy(nam"
    assert skipped == "skipped [5, 6] finite True"
    assert parts == "parts 2"
    assert hooks == "hooks 0 0"


ENDLESS = """
import sys, torch
from torch.utils.data import DataLoader
own = "own" in sys.argv
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", enabled=own, init_scale=2.0**10, growth_interval=10**6)
for x in (batch for _ in range(10**6) for batch in DataLoader(torch.ones(64, 4), batch_size=4)):
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def answer(listener: Listener, identifier: str, command: commands.Command) -> Any:
    """Send one command; its outcome."""
    raw = msgspec.Raw(msgspec.msgpack.encode(command))
    request = msgspec.msgpack.encode(commands.CommandRequest(id=identifier, command=raw))
    assert listener.peer is not None
    listener.socket.send_multipart([listener.peer, *wire.message(wire.COMMAND, request)])

    def outcome() -> Any:
        listener.drain(0.05)
        every = [*listener.of(CommandApplied), *listener.of(CommandRefused)]
        return next((event for event in every if event.id == identifier), None)

    return until(outcome, f"an answer to {command}")


@pytest.mark.parametrize("whose", ["own", "ours", "none"])
def test_commands_set_scale_and_policy(whose: str, forge: Forge, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    settings = {"precision": "O1:fp16", "scaler": "torch"} if whose == "ours" else {}
    words = ["own"] if whose == "own" else []
    asked = [
        commands.SetScale(scale=64.0),
        commands.SetScalerPolicy(policy="torch", growth_interval="3", scale_ceiling=128.0),
        commands.SetScalerPolicy(policy="torch", scale_floor=8.0, scale_ceiling=4.0),
        commands.SetScale(scale=32.0),
        commands.StopAtBoundary(),
    ]
    with listening(tmp_path) as listener:
        given = specification(tmp_path, **settings)
        process = forge.run(script, tmp_path, *words, specification=given)
        listener.until(StepFinished, 3)
        outcomes = []
        for index, command in enumerate(asked):
            # Enough steps to see what the one before has changed.
            listener.until(StepFinished, len(listener.steps()) + 8)
            outcomes.append(answer(listener, str(index), command))
        listener.until(AgentExited)
        until(lambda: process.poll() is not None, "the end of the script")
    if whose == "none":
        assert [type(outcome) for outcome in outcomes] == [CommandRefused] * 4 + [CommandApplied]
        assert "no loss scaler" in outcomes[0].reason
        return
    kinds = [CommandApplied, CommandApplied, CommandRefused, CommandApplied, CommandApplied]
    assert [type(outcome) for outcome in outcomes] == kinds
    assert "64" in outcomes[0].note
    assert "floor 8 is above ceiling 4" in outcomes[2].reason
    scales = {step.step: step.loss_scale_after for step in listener.steps()}
    first, second = outcomes[0].step, outcomes[1].step
    assert scales[first] >= 1024.0
    assert all(scales[step] == 64.0 for step in range(first + 1, second + 1))
    # Three clean windows, then the ceiling, which it never leaves.
    assert [scales[second + k] for k in range(1, 8)] == [64.0, 64.0, *[128.0] * 5]
    # Set again, by now under the policy's rules.
    last = outcomes[3].step
    assert [scales[last + k] for k in range(1, 8)] == [*[32.0] * 2, *[64.0] * 3, *[128.0] * 2]
    # Where the scaler is ours, it says first how it began.
    replaced = listener.of(ScalerReplaced)[-1]
    assert replaced.replaced == ("GradScaler" if whose == "own" else "torch")


def test_a_scaler_of_ours_says_its_knobs_and_each_limit_once(tmp_path: Path, forge: Forge) -> None:
    script = tmp_path / "script.py"
    # No parameter's gradient is bad: the scale grows each second window, to its ceiling.
    script.write_text(KNOWN_GRADIENTS.replace("(2, 5, 9)", "()"))
    knobs = {
        "scaler": "torch",
        "init_scale": 512.0,
        "growth_interval": "2",
        "scale_ceiling": 1024.0,
    }
    with listening(tmp_path) as listener:
        spec = specification(tmp_path, precision="O1:fp16", **knobs)
        run = forge.run(script, tmp_path, specification=spec)
        listener.follow(run)
    assert run.returncode == 0, run.communicate()[1].decode()
    (policy,) = listener.of(ScalerReplaced)
    assert (policy.policy, policy.replaced, policy.knobs["ceiling"]) == ("torch", "", 1024.0)
    assert [(e.limit, e.step) for e in listener.of(ScaleLimitReached)] == [("ceiling", 2)]


@pytest.mark.parametrize("clips", ["clips", ""])
def test_headroom_is_that_of_the_scaled_gradients(tmp_path: Path, forge: Forge, clips: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(KNOWN_GRADIENTS)
    with listening(tmp_path) as listener:
        spec = specification(tmp_path, precision="O1:fp16", scaler="torch", init_scale=1024.0)
        run = forge.run(script, tmp_path, *([clips] if clips else []), specification=spec)
        listener.follow(run)
    assert run.returncode == 0, run.communicate()[1].decode()
    found = listener.of(OverflowLocated)
    assert [(event.step, event.loss_scale) for event in found] == [(3, 1024), (6, 512), (10, 256)]
    for event in found:
        assert event.headroom_octaves == pytest.approx(math.log2(65504 / (4 * event.loss_scale)))
