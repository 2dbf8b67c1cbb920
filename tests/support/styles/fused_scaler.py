"""Fused AdamW under a GradScaler: on overflow `optimizer.step` is called and changes nothing.

python fused_scaler.py plain|unscale
"""

import sys

import torch
from truth import Truth, changed, copy_of

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-4)
truth = Truth()
for x in torch.randn(6, 8, 4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    scaler.scale(loss).backward()
    if sys.argv[1] == "unscale":
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = copy_of(model.parameters())
    scaler.step(optimizer)
    truth.step(applied=changed(model.parameters(), before))
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print("scale", scaler.get_scale())
truth.finish(model.parameters())
