"""A loop of two optimizers without forward, loader or clip: the hooks that others never reach."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
holder = nn.ParameterList([torch.randn(5), torch.randn(5)])
first = torch.optim.SGD([holder[0]], lr=0.1)
second = torch.optim.AdamW([holder[1]], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(12):
    first.zero_grad()
    second.zero_grad()
    losses = [(holder[0] * holder[1]).pow(2).mean(), (holder[0] - 1).pow(2).mean()]
    torch.autograd.backward(scaler.scale(losses))
    print([loss.item().hex() for loss in losses])
    if step % 5 == 4:
        holder.zero_grad()
        continue
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
digest = hashlib.sha256()
for parameter in holder:
    digest.update(parameter.detach().numpy().tobytes())
print("WEIGHTS", digest.hexdigest())
