"""Windows of three micro-batches under a GradScaler; prints what it sees of each step.

The line of a step: its number, whether the weights changed, the scale after, the losses.
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
data = torch.randn(8, 4)
for step in range(1, int(sys.argv[1]) + 1):
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(3):
        loss = model(data).pow(2).mean() / 3
        losses.append(loss.item())
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    changed = any(
        not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
    )
    print(step, changed, scaler.get_scale(), *losses, flush=True)
