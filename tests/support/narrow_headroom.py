"""Six ordinary windows under autocast at a scale that leaves little room, then one that overflows.

python narrow_headroom.py drifted|bad   (gradients a sixth larger than before, or ten times)
"""

import sys

import torch
from torch import nn

# fp16's largest value is 65504: at scale 1024 gradients of 63.9 fit, of 64 do not.
last = {"drifted": 70.0, "bad": 700.0}[sys.argv[1]]
first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
model = nn.ModuleList([first, second])
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for layer in (first, second):
    nn.init.constant_(layer.weight, 0.01)
for step in range(7):
    with torch.autocast("cpu", torch.float16):
        # d loss / d weight is the input itself: known gradients, times the scale.
        x = torch.tensor([[60.0 if step < 6 else last]])
        y = torch.tensor([[40.0]])
        loss = (first(x) + second(y)).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"{loss.item():.4g} {scaler.get_scale():g}")
