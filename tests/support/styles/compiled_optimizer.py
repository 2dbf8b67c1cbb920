"""Only the optimizer's step is compiled."""

import counting
import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))


@torch.compile(backend=counting.backend)
def update():
    optimizer.step()


truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    update()
    truth.step()
counting.report()
truth.finish(model.parameters())
