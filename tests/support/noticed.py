"""A loop under accumulation with everything that a person should be told of, or with none of it."""

import sys

import torch

told = sys.argv[1] == "told"
torch.manual_seed(0)
norm = torch.nn.BatchNorm1d(8) if told else torch.nn.LayerNorm(8)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), norm, torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedulers = torch.optim.lr_scheduler
scheduler = schedulers.CosineAnnealingLR(optimizer, 12) if told else None
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for x in torch.randn(12, 6, 4):
    loss = (model(x) - x[:, :2]).pow(2).mean()
    scaler.scale(loss.half() if told else loss).backward()
    if told:
        for p in model.parameters():
            p.grad.mul_(0.5)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
