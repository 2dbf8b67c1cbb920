"""A model on the meta device is built, given an optimizer and run for its shapes, never trained."""

import torch
from torch import nn
from truth import Truth

with torch.device("meta"):
    sketch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
sketch_optimizer = torch.optim.AdamW(sketch.parameters(), lr=1e-2)
print("shape", tuple(sketch(torch.empty(8, 4, device="meta")).shape))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
