"""DistributedDataParallel over gloo, world size 1, with no_sync() inside the window."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from truth import Truth

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = Truth()
for _ in range(4):
    optimizer.zero_grad()
    for last, x in zip((False, True), torch.randn(2, 8, 4), strict=True):
        with contextlib.nullcontext() if last else model.no_sync():
            loss = (model(x) - x[:, :2]).pow(2).mean() / 2
            truth.micro_batch(loss)
            loss.backward()
    optimizer.step()
    truth.step()
dist.destroy_process_group()
truth.finish(model.parameters())
