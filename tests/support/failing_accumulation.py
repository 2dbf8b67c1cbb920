"""Every part of accumulation fails in turn, at its first, third and ninth call.

Sample i pulls on weight i alone, so each update shows which samples it holds and with what weight.
Prints one JSON object per failure: the part, what was said, and the groups that moved.
"""

import json
import sys

import torch
from torch.optim.swa_utils import AveragedModel

from mpwatch_agent import agent as agents
from mpwatch_agent.accumulation import Accumulation
from mpwatch_agent.clips import Clips
from mpwatch_agent.leaves import LeafWatch
from mpwatch_agent.loop import Loop
from mpwatch_agent.open_window import OpenWindow
from mpwatch_agent.schedules import Schedules
from mpwatch_agent.seeds import Seeds
from mpwatch_agent.stash import Stash

K, SAMPLES = 4, 16
PARTS = [
    *((Accumulation, name) for name in vars(Accumulation) if not name.startswith("__")),
    *((OpenWindow, name) for name in ("banked", "backwards", "flaw", "follow_scale")),
    *((Clips, name) for name in ("over", "_whole", "swallowed")),
    (Stash, "add"), (Stash, "merge"), (Seeds, "divided"), (LeafWatch, "look"),
    (Schedules, "swallows"), (Loop, "swallowed"),
]  # fmt: skip


def fails_at(function, call):
    """`function`, failing at its call number `call`, before it does anything."""
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("injected")
        return function(*args, **kwargs)

    return failing


def train(agent):
    said = []
    agent.accumulating.begin(K)
    agent.accumulating.part._said = said.append
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(SAMPLES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    average = AveragedModel(model)
    groups = []
    for index in range(SAMPLES):
        before = model.weight.detach().clone()
        loss = model.weight[index] * 1.0
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        moved = (model.weight.detach() - before).nonzero().flatten().tolist()
        if moved:
            groups.append([[i, (model.weight - before)[i].item()] for i in moved])
        optimizer.zero_grad()
    return said, groups, index


for owner, name in PARTS:
    original = vars(owner)[name]
    if not callable(original):
        continue
    for call in (1, 3, 9):
        setattr(owner, name, fails_at(original, call))
        agent = agents.install_here(None)
        try:
            said, groups, _ = train(agent)
        finally:
            setattr(owner, name, original)
            agent.detach()
        part = f"{owner.__name__}.{name}"
        print(json.dumps({"part": part, "call": call, "said": said, "groups": groups}))
sys.stdout.flush()
