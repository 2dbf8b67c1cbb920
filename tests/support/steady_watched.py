"""`watch()` in a loop that becomes steady: prints one JSON object of what is seen from outside.

A step of its optimizer raises once, the optimizer is replaced, a limit is set in the middle, a
scaled loss is never used as it is.
"""

import gc
import json
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpwatch_agent import agent
from mpwatch_agent.watching import watch

torch.manual_seed(0)
model = nn.Linear(4, 1)
before = torch.optim.SGD(model.parameters(), lr=0.01)
# Made before the hooks: it is given to `watch`, and watched by hooks of its own.
optimizer: Any = before
job = watch(optimizer, serve=False)
del before
watching = agent.installed()
assert watching is not None
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
seen: dict[str, Any] = {}
updates = 0


def train(batch: torch.Tensor, used_as_it_is: bool = True) -> Any:
    global updates
    loss = model(batch).pow(2).mean()
    if used_as_it_is:
        loss.backward()
        optimizer.step()
        held = None
    else:
        scaled = scaler.scale(loss)
        (scaled * 0.5).backward()
        held = weakref.ref(scaled)
        scaler.step(optimizer)
        scaler.update()
    updates += 1
    optimizer.zero_grad()
    return held


for number, (batch,) in enumerate(job.batches(loader)):
    if number == 30:
        optimizer.param_groups[0]["lr"] = "none"
        try:
            train(batch)
        except TypeError:
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.zero_grad()
            continue
    train(batch)
seen["raised"] = [job.steps, updates, watching.steady.total]

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
gc.collect()
noted = watching.steady.total
for (batch,) in job.batches(loader):
    train(batch)
seen["replaced"] = [job.steps, updates, watching.steady.total - noted]

noted = watching.steady.total
held = [train(batch, used_as_it_is=False) for (batch,) in job.batches(loader)]
gc.collect()
seen["held"] = [sum(each() is not None for each in held), watching.steady.total - noted]

for (batch,) in job.batches(loader):
    train(batch)
    if watching.gate.steady:
        break
watch(max_steps=job.steps + 7)
limited = updates
for (batch,) in job.batches(loader):
    train(batch)
seen["limited"] = [updates - limited, job.stopping]
print(json.dumps(seen))
