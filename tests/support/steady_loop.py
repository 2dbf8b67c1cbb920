"""Loops long enough to become steady, each with something unusual; prints what it sees itself.

Argument: a style. One JSON line per update: the losses passed to backward (unscaled), samples,
learning rate, scale before and after, the norm its clip returned, whether weights changed. The
last line is how many steps the agent only noted.
"""

import json
import os
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpwatch_agent import agent
from tests.support.late_numbers import be_late

STYLE = sys.argv[1]
if "late" in STYLE:
    # Numbers that come a step later, as those of a device do.
    be_late()
STEPS = 90
WINDOW = 3 if "window" in STYLE else 1
SCALED = "scaled" in STYLE

torch.manual_seed(0)
if "default" in STYLE:
    torch.set_default_device("cpu")
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=31, enabled=SCALED)
data = TensorDataset(torch.randn(40, 4))
loader = DataLoader(data, batch_size=4, shuffle=True)
facts: dict[str, Any] = {}


def batches() -> Any:
    while True:
        for (batch,) in loader:
            yield batch


source = batches()


def weights() -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def micro_batch(step: int, index: int) -> None:
    batch = next(source)
    if step in (40, 41) and "overflow" in STYLE:
        batch = batch.clone()
        batch[0, 0] = float("inf") if step == 41 else 1e38
    if step == 41 and "poisons" in STYLE:
        batch = torch.full_like(batch, float("nan"))
    output = model(batch)
    if step == 50 and "twice" in STYLE:
        output = model(batch)
    loss = output.pow(2).mean() / WINDOW
    facts["losses"].append(loss.item())
    facts["samples"] += len(batch)
    if step == 47 and "retain" in STYLE:
        scaler.scale(loss).backward(retain_graph=True)
        facts["losses"][-1] += loss.item()
    if step == 40 and "throws" in STYLE:
        throws(loss)
    scaler.scale(loss).backward()
    if step == 41 and "injects" in STYLE:
        model[3].weight.grad[0, 1] = float("inf")


def throws(loss: torch.Tensor) -> None:
    """A backward that raises; the script calls it again."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = loss.register_hook(fail)
    try:
        loss.backward(retain_graph=True)
    except ValueError:
        handle.remove()


def clear() -> None:
    if "unset" in STYLE:
        for parameter in model.parameters():
            parameter.grad = None
    elif "module" in STYLE:
        model.zero_grad()
    else:
        optimizer.zero_grad()


def clip(step: int) -> None:
    if "clip" not in STYLE:
        return
    if step == 44 and "two" in STYLE:
        nn.utils.clip_grad_norm_(list(model.parameters())[:2], 1.0)
    facts["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def update(step: int) -> None:
    if "unscale" in STYLE and (step % 20 or "sometimes" not in STYLE):
        scaler.unscale_(optimizer)
        clip(step)
    elif not SCALED:
        clip(step)
    if "values" in STYLE:
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    if step == 38 and "interval" in STYLE:
        scaler.set_growth_interval(14)
    if step == 60 and "tracker" in STYLE:
        scaler._growth_tracker.fill_(scaler.get_growth_interval() - 1)
    if step == 52 and "closure" in STYLE:
        optimizer.step(lambda: None)
        return
    if step == 61 and "direct" in STYLE:
        optimizer.step()
        return
    scaler.step(optimizer)
    if "early" in STYLE:
        optimizer.zero_grad()
    scaler.update(256.0 if step == 55 and "given" in STYLE else None)


def between(step: int) -> None:
    """What a script does between two updates."""
    if "evaluates" in STYLE and (step % 11 == 0 or "always" in STYLE):
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.train()
    if "discards" in STYLE and step % 23 == 0:
        model(next(source)).sum().backward()
        clear()
    if "forks" in STYLE and step == 35:
        child = os.fork()
        if child == 0:
            model(torch.randn(2, 4)).sum().backward()
            os._exit(0)
        os.waitpid(child, 0)
    if "threads" in STYLE and step % 9 == 0:
        other = threading.Thread(target=lambda: model(torch.randn(2, 4)).sum().item())
        other.start()
        other.join()
    if "modes" in STYLE and step == 33:
        with torch.device("cpu"):
            torch.randn(2)
    if "rewrites" in STYLE and step == 38:
        scaler._scale.fill_(64.0)
    if "raises" in STYLE and step == 37:
        try:
            model(torch.randn(2, 5))
        except RuntimeError:
            optimizer.zero_grad()


for step in range(1, STEPS + 1):
    facts = {"losses": [], "samples": 0, "norm": None}
    facts["lr"] = optimizer.param_groups[0]["lr"]
    facts["before"] = scaler.get_scale() if SCALED else None
    before = weights()
    window = 2 if "partial" in STYLE and step % 19 == 0 else WINDOW
    for index in range(window):
        micro_batch(step, index)
    update(step)
    facts["applied"] = any(
        not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
    )
    facts["after"] = scaler.get_scale() if SCALED else None
    clear()
    scheduler.step()
    print(json.dumps(facts), flush=True)
    between(step)
watching = agent.installed()
print(json.dumps(watching.steady.total if watching else 0))
