"""Scripts that once noticed that they were watched, or came to harm by it."""

from pathlib import Path

import pytest

from mpwatch.events import HookDisabled
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge

HEAD = """
import os, random, signal, sys, gc, weakref, functools
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(n=1, dtype=torch.float32):
    for _ in range(n):
        loss = model(torch.randn(8, 4, dtype=dtype)).pow(2).mean() / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
"""

SCRIPTS = {
    "double precision": "model.double(); train(4, torch.float64)",
    "a dispatch mode prints operations": """
from torch.utils._python_dispatch import TorchDispatchMode
class Prints(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print(function)
        return function(*args, **(kwargs or {}))
for _ in range(60):
    with Prints():
        train()
    train()
""",
    "a function mode prints calls": """
from torch.overrides import TorchFunctionMode
class Prints(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print(getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))
for _ in range(4):
    with Prints():
        train()
""",
    "dropped models give their memory back": """
train(4)
model(torch.randn(8, 4)).pow(2).mean().backward()
alive = [weakref.ref(t) for p in model.parameters() for t in (p, p.grad)] + [weakref.ref(optimizer)]
del model, optimizer
gc.collect()
print([r() is not None for r in alive])
""",
    "scripting and exporting in mid-training": """
train(3)
torch.jit.script(model)(torch.zeros(1, 4))
train(2)
torch.export.export(model, (torch.zeros(1, 4),), strict=True)
train(2)
""",
    "a root that is an encoder layer": """
net = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net.train()
    net(torch.randn(4, 5, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.eval()
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 3:] = True
    with torch.no_grad():
        out = net(torch.randn(4, 5, 8), src_key_padding_mask=padding)
        print([value.hex() for value in out.flatten().tolist()])
train(2)
""",
    "an optimizer per epoch": """
for _ in range(4):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(3)
""",
    "two threads train at once": """
import threading
train(2)
ends = {}
def alone(name):
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    for number, parameter in enumerate(net.parameters()):
        torch.nn.init.constant_(parameter, 0.01 * (number + 1))
    own = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(1500):
        loss = (net(torch.ones(2, 4)) - 1).pow(2).mean()
        loss.backward()
        own.step()
        own.zero_grad()
    ends[name] = loss.item().hex()
threads = [threading.Thread(target=alone, args=(name,)) for name in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(ends.items()))
train(2)
""",
    "a whole model saved in mid-training": """
import hashlib, io
train(3)
file = io.BytesIO()
torch.save(model, file)
print(hashlib.sha256(file.getvalue()).hexdigest())
names = [torch.nn.Sequential, torch.nn.Linear, torch.nn.ReLU, set]
torch.serialization.add_safe_globals(names)
file.seek(0)
print(torch.load(file, weights_only=True))
train(2)
""",
    "a traced module's graph": """
train(3)
print(torch.jit.trace_module(model, {"forward": torch.zeros(1, 4)}).graph)
train(2)
""",
    "scaled losses without a backward": """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
alive = []
for _ in range(40):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    alive.append(weakref.ref(loss))
    gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient / 4
    optimizer.step()
del loss
print(sum(reference() is not None for reference in alive))
train(2)
""",
    "a deep copy trained beside": """
import copy
train(2)
other, rest = copy.deepcopy(optimizer), copy.deepcopy(model)
train(2)
other.step()
train(2)
""",
}

CLOSES = """
train(3)
os.closerange(3, 1000)
train(3)
"""

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
"""


def run(
    forge: Forge, directory: Path, script: Path, watched: bool
) -> tuple[Listener, int | None, bytes, bytes]:
    directory.mkdir()
    spec = specification(directory) if watched else None
    with listening(directory) as listener:
        process = forge.run(script, directory, specification=spec)
        listener.follow(process)
    return listener, process.returncode, *process.communicate()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_cannot_tell(tmp_path: Path, forge: Forge, name: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name])
    _, *plain = run(forge, tmp_path / "plain", script, watched=False)
    listener, *watched = run(forge, tmp_path / "watched", script, watched=True)
    assert plain[0] == 0, plain
    assert watched == plain
    assert listener.of(HookDisabled) == []
    assert listener.steps()


def test_an_optimizer_per_epoch_goes_on_counting(tmp_path: Path, forge: Forge) -> None:
    """Limits and totals follow the loop, not one optimizer object."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS["an optimizer per epoch"])
    directory = tmp_path / "watched"
    directory.mkdir()
    with listening(directory) as listener:
        spec = specification(directory, max_steps=8)
        process = forge.run(script, directory, specification=spec)
        listener.follow(process)
    assert process.returncode == 0
    assert process.communicate()[0].count(b"\n") == 8
    assert [step.step for step in listener.steps()] == list(range(1, 9))


@pytest.mark.parametrize("text", [CLOSES, FEW_DESCRIPTORS], ids=["closed", "few"])
def test_file_descriptors_that_are_closed_or_few(tmp_path: Path, forge: Forge, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text + HEAD + "train(3)" if "setrlimit" in text else HEAD + text)
    _, *plain = run(forge, tmp_path / "plain", script, watched=False)
    assert plain[0] == 0, plain
    _, code, stdout, stderr = run(forge, tmp_path / "watched", script, watched=True)
    assert (code, stdout) == (0, plain[1])
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith(b"mpwatch: ")
