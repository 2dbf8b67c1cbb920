"""Loops that accumulate by hand, each right or with one well-known fault, by its name."""

import itertools
import sys

import torch
import torch.nn.functional as F

N, WINDOWS = 4, 12
style = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=100)


def loss_of(ignored=0):
    targets = torch.randint(0, 5, (6,))
    targets[:ignored] = -100
    return F.cross_entropy(model(torch.randn(6, 4)), targets)


def step():
    optimizer.step()
    optimizer.zero_grad()


if style in ("partial", "flushed"):
    for _, index in itertools.product(range(4), range(10)):
        if index == 0:
            optimizer.zero_grad()
        (loss_of() / N).backward()
        if (index + 1) % N == 0 or (style == "flushed" and index == 9):
            step()
    sys.exit()
for window, index in itertools.product(range(WINDOWS), range(N)):
    if style == "cleared":
        optimizer.zero_grad()
    loss = loss_of(index + 1 if style == "unequal" else 0)
    (loss if style == "sum" else loss / N).backward()
    last = index == N - 1
    if style == "clipped" or (style == "clipped_once" and last):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if style == "schedule" or (style == "schedule_right" and last):
        scheduler.step()
    if last and style == "thrown_away" and window % 3 == 2:
        optimizer.zero_grad()
    elif last:
        step()
