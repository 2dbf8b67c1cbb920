"""K is changed at random moments; every sample leaves its own mark, so that each can be counted.

    python changing.py SAMPLES CHANGES [bare]

Sample i pulls on weight i alone: after an update exactly the samples of its window have moved, each
by 1/K times the learning rate. Prints one JSON object per update: which samples moved, by how much,
the scale during the window and what K was asked for last.
"""

import json
import random
import sys

import msgspec
import torch

from mpwatch.commands import CommandRequest, SetAccumulation
from mpwatch_agent.agent import installed

samples, changes, bare = int(sys.argv[1]), int(sys.argv[2]), "bare" in sys.argv
dice = random.Random(7)
torch.manual_seed(0)


class Marks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(samples))

    def forward(self, index):
        return self.weight[index]


model = Marks()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
# Bare: no module is called, so that nobody sees a forward.
forward = (lambda index: model.weight[index]) if bare else model
agent = installed()
asked = 0


def ask():
    """Now and then, at whatever moment this is: another K, sometimes a bad one, some twice."""
    global asked
    if asked >= changes or dice.random() > changes / samples / 2:
        return
    asked += 1
    k = dice.choice([1, 2, 3, 4, 5, 8])
    command = msgspec.Raw(msgspec.msgpack.encode(SetAccumulation(multiplier=k)))
    if dice.random() < 0.05:
        bad = dice.choice([0, -1, 10**9, "x"])
        raw = msgspec.msgpack.encode({"command": "set_accumulation", "multiplier": bad})
        command = msgspec.Raw(raw)
    request = msgspec.msgpack.encode(CommandRequest(id=f"c{asked}", command=command))
    for _ in range(1 if dice.random() < 0.9 else 2):
        agent.boundary._answer(request)


before = model.weight.detach().clone()
scales = []
for index in range(samples):
    ask()
    if index % 50 == 3 and not bare:
        model.eval()
        with torch.no_grad():
            model(torch.tensor([index]))
        ask()
        model.train()
    out = forward(torch.tensor([index]))
    ask()
    if dice.random() < 0.02:
        out = out * float("inf")
    out.register_hook(lambda gradient: ask())
    scales.append(scaler.get_scale())
    scaler.scale(out.sum()).backward()
    ask()
    scaler.step(optimizer)
    ask()
    scaler.update()
    moved = (model.weight.detach() != before).nonzero().flatten().tolist()
    if moved or scaler.get_scale() != scales[-1]:
        values = model.weight.detach()[moved].tolist()
        print(json.dumps({"at": index, "moved": moved, "by": values, "scales": scales}))
        scales = []
        before = model.weight.detach().clone()
    optimizer.zero_grad()
