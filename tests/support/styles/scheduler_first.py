"""The scheduler steps before the optimizer: torch warns, and the warning must stay as it is."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
truth = Truth()
for x in torch.randn(4, 8, 4):
    scheduler.step()
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
    print("lr", scheduler.get_last_lr()[0].hex())
truth.finish(model.parameters())
