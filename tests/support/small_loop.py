"""A training loop that passes through every hook: loader, scaler, clip, scheduler, evaluation."""

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(48, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
for epoch in range(epochs):
    model.train()
    for index, (x, y) in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y) / 2
        if epoch == 0 and index in (4, 5):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        print(loss.item().hex())
        if index % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            model.zero_grad()
    model.eval()
    with torch.no_grad():
        print("evaluation", nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print("WEIGHTS", digest.hexdigest())
