"""One mistake around a loss scaler per run, or the same loop without it.

python scaler_mistakes.py A1..A10 [healthy]
"""

import contextlib
import sys

import torch
from torch import nn

case, *rest = sys.argv[1:]
healthy = bool(rest)
torch.manual_seed(0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(16, 4)).float().pow(2).mean()


def train(
    steps: int,
    scaler: torch.amp.GradScaler,
    overflow: tuple[int, ...] = (),
    broken: tuple[int, ...] = (),
) -> None:
    """Steps in `overflow` have an Inf among the gradients, those in `broken` a loss that is NaN."""
    for step in range(steps):
        loss = loss_of(model)
        scaler.scale(loss * float("nan") if step in broken else loss).backward()
        if step in overflow:
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
if case == "A1":
    # Healthy: it backs off at the start, and overflows rarely enough to grow back.
    interval = 20 if healthy else 2000
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    train(220, scaler, (0, 1, 2, 3, *range(39, 220, 40)))
if case == "A2":
    train(20, scaler, (0, 1, 2, 3), (12,) if healthy else tuple(range(8, 20)))
if case == "A3":
    other = net()
    second = torch.optim.Adam(other.parameters())
    loss = loss_of(model) + (loss_of(other) if healthy else 0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    with contextlib.suppress(AssertionError):
        scaler.step(second)
    scaler.update()
if case == "A4":
    model = net() if healthy else net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4, dtype=next(model.parameters()).dtype)
    with torch.autocast("cpu", torch.float16, enabled=healthy):
        loss = model(x).float().pow(2).mean()
    scaler.scale(loss).backward()
    with contextlib.suppress(ValueError):
        scaler.step(optimizer)
        scaler.update()
if case == "A5":
    running = 0
    with contextlib.suppress(RuntimeError):
        for _ in range(3):
            for index in range(10):
                scaler.scale(loss_of(model) / 4).backward()
                running += 1
                full = (index + 1) % 4 == 0
                if full if healthy else running % 4 == 0:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if full:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
if case == "A6":
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.01 * step)
    # The scale comes down from its start, which is normal; a burst of overflows comes later.
    for step in range(24):
        before = scaler.get_scale()
        # Healthy: an overflow comes right after an applied step as well, whose schedule moved.
        burst = step < 6 or 12 <= step < 16
        train(1, scaler, (0,) if burst or (healthy and step % 2) else ())
        if not healthy or scaler.get_scale() >= before:
            scheduler.step()
if case == "A7":
    optimizer = torch.optim.Adam(model.parameters())
    train(4, scaler)
    kept, state = optimizer.state_dict(), scaler.state_dict()
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(kept)
    scaler = torch.amp.GradScaler("cpu")
    if healthy:
        scaler.load_state_dict(state)
    train(4, scaler)
if case == "A8":
    for _ in range(5):
        scaler.scale(loss_of(model)).backward()
        if healthy:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
if case == "A10":
    with contextlib.suppress(RuntimeError):
        for step in range(4):
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if healthy or step < 1:
                scaler.update()
            optimizer.zero_grad()
if case == "A9":
    dtype = torch.float32 if healthy else torch.float16
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    for _ in range(2):
        weight.grad = torch.tensor([0, 1e-4, 1e-3, 1], dtype=dtype)
        optimizer.step()
