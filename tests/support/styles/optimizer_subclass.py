"""A subclass that calls super().step(), made when a plain AdamW exists already."""

import torch
from truth import Truth


class Announcing(torch.optim.AdamW):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().step(closure)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
unused = torch.optim.AdamW(model.parameters(), lr=1.0)
optimizer = Announcing(model.parameters(), lr=1e-2)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
print("calls", optimizer.calls)
truth.finish(model.parameters())
