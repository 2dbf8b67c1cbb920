"""The script's own GradScaler around fp16: on, off, or the old CUDA name; n micro-batches each.

    python own_scaler.py enabled|disabled|cuda N [N ...]

The initial scale is too large: the first updates overflow and are skipped.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from truth import Truth, changed, copy_of

which, *windows = sys.argv[1:]
truth = Truth()
models = nn.ModuleList()
for index, n in enumerate(map(int, windows)):
    torch.manual_seed(n)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    models.append(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if which == "cuda":
        scaler = torch.cuda.amp.GradScaler(init_scale=2.0**24)
    else:
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**24, backoff_factor=2.0**-4, enabled=which == "enabled"
        )
    for step in range(5):
        for _ in range(n):
            x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) / n
            truth.micro_batch(loss)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = copy_of(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        truth.step(applied=changed(model.parameters(), before), optimizer=index)
        optimizer.zero_grad()
        if step >= 2:  # an update has been applied by now, which silences the scheduler's warning
            scheduler.step()
        print("scale", scaler.get_scale())
truth.finish(models.parameters())
