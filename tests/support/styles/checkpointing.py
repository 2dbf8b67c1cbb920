"""Activation checkpointing: non-reentrant, then reentrant (whose backward calls backward)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from truth import Truth


class Net(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


truth = Truth()
nets = nn.ModuleList()
for index, use_reentrant in enumerate((False, True)):
    torch.manual_seed(0)
    model = Net(use_reentrant)
    nets.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        for x in torch.randn(2, 8, 4):
            loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean() / 2
            truth.micro_batch(loss)
            loss.backward()
        optimizer.step()
        truth.step(optimizer=index)
truth.finish(nets.parameters())
