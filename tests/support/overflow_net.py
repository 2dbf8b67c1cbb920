"""Overflows put in by the script itself, one parameter and micro-batch after the other.

    python overflow_net.py transformer|conv whole|single MICRO [clip]

Prints (step, micro-batch, parameter) of each and restores the weights after every step, so that
one run covers all of them. With `clip` there is no scaler, and the clip is the first to see it.
"""

import sys

import torch
from torch import nn

which, how, windows, *rest = sys.argv[1:]
n = int(windows)
torch.manual_seed(0)
if which == "transformer":
    model: nn.Module = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    shape: tuple[int, ...] = (2, 5, 16)
else:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(32, 40), nn.Linear(40, 4),
    )  # fmt: skip
    shape = (2, 3, 6, 6)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not rest)
names = [name for name, _ in model.named_parameters()]
parameters = list(model.parameters())
start = [parameter.detach().clone() for parameter in parameters]
for step in range(1, 2 * len(names) + 1):
    # Every second window is clean; parameters and micro-batches go round.
    hit = step // 2 - 1 if step % 2 == 0 else None
    for micro in range(n):
        loss = model(torch.randn(shape)).pow(2).mean() / n
        scaler.scale(loss).backward()
        if hit is not None and micro == hit % n:
            gradient = parameters[hit].grad
            if how == "whole":
                gradient.fill_(float("nan") if hit % 3 == 2 else float("inf"))
            else:
                gradient.view(-1)[(hit * 37) % gradient.numel()] = float("inf")
            print(step, micro, names[hit], "nan" if how == "whole" and hit % 3 == 2 else "inf")
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(parameters, start, strict=True):
            parameter.copy_(value)
