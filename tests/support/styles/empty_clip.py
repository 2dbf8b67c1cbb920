"""Clipping over a generator that turns out empty: torch warns and names the script's line."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()
for x in torch.randn(3, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.ndim > 2), 1.0)
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
