"""One loss, one backward, three optimizers of three kinds."""

import torch
from torch import nn
from truth import Truth

torch.manual_seed(0)
model = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 1)})
optimizers = [
    torch.optim.SGD(model["a"].parameters(), lr=0.05),
    torch.optim.Adam(model["b"].parameters(), lr=1e-2),
    torch.optim.RMSprop(model["c"].parameters(), lr=1e-3),
]
truth = Truth()
for x in torch.randn(5, 8, 4):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = (model["c"](model["b"](model["a"](x).tanh()).tanh()) - x[:, :1]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    for index, optimizer in enumerate(optimizers):
        optimizer.step()
        truth.step(optimizer=index)
truth.finish(model.parameters())
