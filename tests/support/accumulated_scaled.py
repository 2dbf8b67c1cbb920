"""Loops that accumulate with every kind of optimizer, scaler, clip and schedule, and a GAN."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.by_hand import (
    BATCHES,
    HAND,
    K,
    added,
    batches,
    begins,
    by,
    digest,
    loss_of,
    network,
    put_back,
)

OPTIMIZERS = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.05, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, **kw),
}
KINDS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SCHEDULERS = {
    "none": lambda o: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=BATCHES),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        ],
        milestones=[2],
    ),
}


def matrix(optimizer, kind, scaling, clip, scheduling, bad=(), dtype=None):
    """The usual loop: `scaling` is none, scaled, unscaled (with unscale_)."""
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters(), **KINDS[kind])
    scheduler = SCHEDULERS[scheduling](opt)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=2, enabled=scaling != "none"
    )
    norms = []
    for i, x in enumerate(batches(), 1):
        loss = loss_of(model, x)
        if dtype is not None:
            loss = loss.to(dtype)
        if i in bad:
            loss = loss * float("inf")
        scaler.scale(by(loss)).backward()
        if i % HAND:
            continue
        if scaling == "unscaled":
            scaler.unscale_(opt)
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if i % K == 0:
                norms.append(norm)
        scaler.step(opt)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        opt.zero_grad()
    return digest(
        model.state_dict(),
        opt.state_dict()["state"],
        [g["lr"] for g in opt.param_groups],
        scaler.state_dict(),
        norms,
        None if scheduler is None else scheduler.last_epoch,
    )


def gan():
    """Two optimizers, one scaler; the loss of one leaves gradients in the other's network."""
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
    d = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    og = torch.optim.Adam(g.parameters(), lr=1e-2)
    od = torch.optim.Adam(d.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-4)
    ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in (od, og)]
    kept = None
    for i, real in enumerate(batches(), 1):
        noise = real[:, 2:]
        last = i % HAND == 0
        od.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = g(noise)
            loss_d = F.binary_cross_entropy_with_logits(
                d(real), ones
            ) + F.binary_cross_entropy_with_logits(d(fake.detach()), zeros)
        scaler.scale(by(loss_d)).backward()
        if HAND > 1:  # by hand a GAN keeps D's own gradients apart from those that G leaves
            kept = added(d, kept)
        if last:
            if kept is not None:
                put_back(d, kept)
                kept = None
            scaler.step(od)
        if begins(i):
            og.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_g = F.binary_cross_entropy_with_logits(d(fake), ones)
        scaler.scale(by(loss_g)).backward()
        if last:
            scaler.step(og)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
    rates = [scheduler.get_last_lr() for scheduler in schedulers]
    return digest(
        g.state_dict(), d.state_dict(), og.state_dict()["state"], scaler.state_dict(), rates
    )


def rescaled():
    """The script sets another scale in the middle of a window: the sums have to follow it."""
    model = network()
    opt = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for i, x in enumerate(batches(), 1):
        scaler.scale(by(loss_of(model, x))).backward()
        if i % HAND == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if i == 5:
            for p in model.parameters() if HAND > 1 else ():
                p.grad.mul_(0.5)
            scaler.update(2.0**9)
    return digest(model.state_dict(), opt.state_dict()["state"], scaler.state_dict())
