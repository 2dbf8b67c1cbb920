"""torch.autograd.backward called by its own name, with one loss in a list."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    torch.autograd.backward([loss])
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
