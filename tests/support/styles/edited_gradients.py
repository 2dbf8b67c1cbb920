"""Gradients are looked at and changed by hand between backward and step."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(0.5).clamp_(-0.1, 0.1)
        p.grad.add_(torch.randn_like(p) * 1e-3)
        print("norm", p.grad.norm().item().hex())
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
