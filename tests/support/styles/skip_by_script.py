"""The script looks at the gradient norm itself and throws a window away."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(6, 2, 8, 4)
batches[2, 1, 0, 0] = float("inf")
truth = Truth()
for window in batches:
    for x in window:
        loss = (model(x) - x[:, :2]).pow(2).mean() / 2
        truth.micro_batch(loss)
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        print("not finite, window thrown away")
        optimizer.zero_grad()
        truth.discard()
        continue
    optimizer.step()
    truth.step()
    optimizer.zero_grad()
truth.finish(model.parameters())
