"""A loop that draws its next batch between the scaler's step and its update, until it is stopped.

Drawing is where a command is found, and there it cannot act yet. Prints how many steps were noted.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpwatch_agent import agent

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1_000_000)
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)


def batches() -> Any:
    for _ in range(10_000):
        yield from loader


source = batches()
(batch,) = next(source)
try:
    while True:
        scaler.scale(model(batch).pow(2).mean()).backward()
        scaler.step(optimizer)
        (batch,) = next(source)
        scaler.update()
        optimizer.zero_grad()
finally:
    watching = agent.installed()
    print(watching.steady.total if watching else 0)
