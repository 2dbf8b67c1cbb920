"""Complex parameters; the loss is real."""

import torch
from truth import Truth

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
optimizer = torch.optim.Adam([weight], lr=1e-2)
truth = Truth()
for x in torch.randn(5, 8, 4, dtype=torch.complex64):
    optimizer.zero_grad()
    loss = (x @ weight - x[:, :2]).abs().pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish([weight])
