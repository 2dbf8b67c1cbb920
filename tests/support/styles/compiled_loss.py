"""Model and loss live in a compiled function with fullgraph=True; backward stays outside."""

import counting
import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.compile(backend=counting.backend, fullgraph=True)
def loss_of(x):
    return torch.nn.functional.mse_loss(model(x), x[:, :2])


truth = Truth()
for _ in range(4):
    optimizer.zero_grad()
    for x in torch.randn(2, 8, 4):
        loss = loss_of(x) / 2
        truth.micro_batch(loss)
        loss.backward()
    optimizer.step()
    truth.step()
counting.report()
truth.finish(model.parameters())
