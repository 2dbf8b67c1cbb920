"""A loop that trains until it is told to stop; arguments choose what it does about being told.

`swallow` catches SystemExit around every step; `finally` cleans up with an evaluation at its end;
`gan` steps two optimizers a round.
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
model, other = nn.Linear(4, 1), nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
second = torch.optim.SGD(other.parameters(), lr=1e-3) if mode == "gan" else None
data = torch.randn(8, 4)
done = 0


def train():
    for net, opt in ((model, optimizer), (other, second)):
        if opt is None:
            continue
        for _ in range(2):
            net(data).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


try:
    for _ in range(2_000_000):
        try:
            train()
            done += 1
        except SystemExit:
            if mode != "swallow":
                raise
            print("swallowed", flush=True)
finally:
    if mode == "finally":
        model.eval()
        with torch.no_grad():
            model(data)
    print("cleaned up after", done, flush=True)
