"""AdamW with foreach=True, two parameter groups."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=True)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
