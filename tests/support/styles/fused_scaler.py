"""Fused AdamW under a GradScaler: on overflow `optimizer.step` is called and changes nothing.

python fused_scaler.py plain|unscale [...]
"""

import sys

import torch
from torch import nn
from truth import Truth, changed, copy_of

truth = Truth()
models = nn.ModuleList()
for index, way in enumerate(sys.argv[1:]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    models.append(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-4)
    for x in torch.randn(6, 8, 4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() - x[:, :2]).pow(2).mean()
        truth.micro_batch(loss)
        scaler.scale(loss).backward()
        if way == "unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = copy_of(model.parameters())
        scaler.step(optimizer)
        truth.step(applied=changed(model.parameters(), before), optimizer=index)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print("scale", scaler.get_scale())
truth.finish(models.parameters())
