"""Four ways of clearing gradients without optimizer.zero_grad() as it is usually written."""

import torch
from torch import nn
from truth import Truth


def by_the_model(model, optimizer):
    model.zero_grad()


def to_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def to_none(model, optimizer):
    for p in model.parameters():
        p.grad = None


def in_place(model, optimizer):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


truth = Truth()
models = nn.ModuleList()
for index, clear in enumerate((by_the_model, to_zeros, to_none, in_place)):
    torch.manual_seed(index)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    models.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        clear(model, optimizer)
        for x in torch.randn(2, 8, 4):
            loss = (model(x) - x[:, :2]).pow(2).mean() / 2
            truth.micro_batch(loss)
            loss.backward()
        optimizer.step()
        truth.step(optimizer=index)
truth.finish(models.parameters())
