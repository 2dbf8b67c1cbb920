"""The whole training step is compiled, backward and optimizer inside."""

import counting
import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend=counting.backend)
def train_step(x):
    loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


truth = Truth()
for x in torch.randn(5, 8, 4):
    truth.micro_batch(train_step(x))
    truth.step()
counting.report()
truth.finish(model.parameters())
