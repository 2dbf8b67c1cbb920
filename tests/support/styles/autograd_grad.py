"""torch.autograd.grad and p.grad = g: the optimizer steps although no backward ran."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = list(model.parameters())
truth = Truth()
for x in torch.randn(5, 8, 4):
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss, seen=False)
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    optimizer.step()
    truth.step()
truth.finish(parameters)
