"""No optimizer: the parameters are updated by hand."""

import torch
from truth import Truth

torch.manual_seed(0)
weight = torch.randn(4, 2, requires_grad=True)
bias = torch.zeros(2, requires_grad=True)
truth = Truth()
for x in torch.randn(5, 8, 4):
    loss = (x @ weight + bias - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    with torch.no_grad():
        for p in (weight, bias):
            p -= 0.1 * p.grad
            p.grad = None
truth.finish([weight, bias])
