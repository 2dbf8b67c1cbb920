"""NaN born once in each module's forward in turn; prints what a second forward would disturb.

    python nan_net.py

Dropout, batch norm, a buffer assigned anew, counters, lists, and draws from every random stream:
whatever the observer runs again must leave no trace in any of them, nor on stdout.
"""

import hashlib
import random

import numpy as np
import torch
from torch import nn


class Odd(nn.Module):
    """Keeps books in attributes, prints, draws from every stream."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        print("forward", self.calls, random.random(), np.random.rand())
        self.average = self.average * 0.9 + x.detach().mean(0)
        return x * self.scale + 0.01 * torch.rand_like(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
        self.odd = Odd()
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return self.last(self.odd(self.body(self.first(x)))) * gain


torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
broken = ["first", "body.0", "body.1", "body.2", "odd", "last"]
for step in range(1, 25 * len(broken) + 1):
    module = broken[step // 25 - 1] if step % 25 == 0 else None
    for micro in range(2):
        handle = None
        if module is not None and micro == 1:
            hook = lambda m, given, output: output * float("nan")  # noqa: E731
            handle = model.get_submodule(module).register_forward_hook(hook)
        loss = model(torch.randn(6, 4), gain=0.5).pow(2).mean() / 2
        scaler.scale(loss).backward()
        if handle is not None:
            handle.remove()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # NaN in batch norm's running numbers would be there in every later forward.
    for buffer in model.buffers():
        buffer.nan_to_num_(0.0)
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
print(digest.hexdigest(), model.odd.calls, len(model.odd.seen), torch.rand(1), random.random())
