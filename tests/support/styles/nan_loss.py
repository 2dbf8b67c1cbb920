"""The loss turns NaN without a scaler: nobody skips, every update is applied."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()
for step, x in enumerate(torch.randn(5, 8, 4)):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    if step == 2:
        loss = (loss - 1e3).log()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
