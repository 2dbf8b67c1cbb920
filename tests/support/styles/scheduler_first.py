"""The scheduler steps before the optimizer: torch warns, and the warning must stay as it is."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
truth = Truth()
for epoch, x in enumerate(torch.randn(4, 8, 4)):
    scheduler.step()
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if epoch), 1.0)
    optimizer.step()
    truth.step()
    print("lr", scheduler.get_last_lr()[0].hex())
truth.finish(model.parameters())
