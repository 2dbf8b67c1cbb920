"""Loops that are run twice: with accumulation written by hand, and without it under mpwatch.

    python accumulated.py hand|plain K CASE...      prints one digest per case

In `hand` the loop itself divides by K and steps every K-th window; in `plain` it knows nothing of
K. What both print must be the same where `plain` is watched with `--accumulate K`.
"""

import hashlib
import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

MODE, K = sys.argv[1], int(sys.argv[2])
HAND = K if MODE == "hand" else 1
BATCHES = 12


def digest(*things):
    """A hash over tensors, numbers and containers of them, bit for bit."""
    found = hashlib.sha256()

    def add(thing):
        if isinstance(thing, torch.Tensor):
            found.update(thing.detach().contiguous().numpy().tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                found.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            for item in thing:
                add(item)
        else:
            found.update(repr(thing).encode())

    add(list(things))
    return found.hexdigest()[:16]


def batches(count=BATCHES, seed=1, features=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, features, generator=generator)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, x):
    return (model(x) - x[:, :2]).pow(2).mean()


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
        scaler.scale(loss / HAND if HAND > 1 else loss).backward()
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
        scaler.scale(loss_d / HAND if HAND > 1 else loss_d).backward()
        if HAND > 1:  # by hand a GAN keeps D's own gradients apart from those that G leaves
            mine = [p.grad.clone() for p in d.parameters()]
            kept = mine if kept is None else [a.add_(b) for a, b in zip(kept, mine, strict=True)]
        if last:
            if kept is not None:
                for p, total in zip(d.parameters(), kept, strict=True):
                    p.grad = total
                kept = None
            scaler.step(od)
        if HAND == 1 or i % HAND == 1:
            og.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_g = F.binary_cross_entropy_with_logits(d(fake), ones)
        scaler.scale(loss_g / HAND if HAND > 1 else loss_g).backward()
        if last:
            scaler.step(og)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
    rates = [scheduler.get_last_lr() for scheduler in schedulers]
    return digest(
        g.state_dict(), d.state_dict(), og.state_dict()["state"], scaler.state_dict(), rates
    )


def zeroing(how):
    """Gradients are cleared at the beginning of a window, in one of five ways."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clear():
        if how == "model":
            model.zero_grad()
        elif how == "zeros":
            opt.zero_grad(set_to_none=False)
        elif how == "none":
            for p in model.parameters():
                p.grad = None
        elif how == "in_place":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        else:
            opt.zero_grad()

    for i, x in enumerate(batches(), 1):
        if HAND == 1 or i % HAND == 1:
            clear()
        loss = loss_of(model, x)
        (loss / HAND if HAND > 1 else loss).backward()
        if i % HAND == 0:
            opt.step()
    return digest(model.state_dict(), opt.state_dict()["state"])


def discarded(how):
    """The script throws windows 3 and 8 away; by hand their gradients are left out of the sum."""
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    good, total = 0, None
    for i, x in enumerate(batches(14), 1):
        if i in (3, 8):
            x = x * float("inf")
        loss = loss_of(model, x)
        (loss / HAND if HAND > 1 else loss).backward()
        if how == "clip":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if not torch.isfinite(norm):
            if how == "none":
                for p in model.parameters():
                    p.grad = None
            elif how == "in_place":
                for p in model.parameters():
                    p.grad.zero_()
            else:
                opt.zero_grad()
            continue
        if HAND > 1:
            mine = [p.grad.clone() for p in model.parameters()]
            total = mine if total is None else [a.add_(b) for a, b in zip(total, mine, strict=True)]
            good += 1
            if good % HAND == 0:
                for p, sum_ in zip(model.parameters(), total, strict=True):
                    p.grad = sum_
                total = None
                opt.step()
        else:
            opt.step()
        opt.zero_grad()
    return digest(model.state_dict(), opt.state_dict()["state"])


def raised():
    """A backward raises half-way at windows 3 and 8; the script clears and goes on."""
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    good, total, broken = 0, None, False

    def break_off(gradient):
        if broken:
            raise ValueError("out of memory, say")

    model[0].weight.register_hook(break_off)
    for i, x in enumerate(batches(14), 1):
        broken = i in (3, 8)
        try:
            by(loss_of(model, x), HAND).backward()
        except ValueError:
            opt.zero_grad()
            continue
        if HAND > 1:
            mine = [p.grad.clone() for p in model.parameters()]
            total = mine if total is None else [a.add_(b) for a, b in zip(total, mine, strict=True)]
            good += 1
            if good % HAND == 0:
                for p, sum_ in zip(model.parameters(), total, strict=True):
                    p.grad = sum_
                total = None
                opt.step()
        else:
            opt.step()
        opt.zero_grad()
    return digest(model.state_dict(), opt.state_dict()["state"])


def grown():
    """A layer joins the optimizer in the middle of a window."""
    model = network()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    for i, x in enumerate(batches(), 1):
        if i == 1:
            opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        by(loss_of(model, x), HAND).backward()
        if i % HAND == 0:
            opt.step()
            opt.zero_grad()
    return digest(model.state_dict(), opt.state_dict()["state"])


def plain_loop(backward, opt_of=None, count=BATCHES, after=None):
    """A loop whose backward is given as a function of (model, x, divisor)."""
    model = network()
    opt = (opt_of or OPTIMIZERS["adamw"])(model.parameters())
    for i, x in enumerate(batches(count), 1):
        backward(model, x, HAND)
        if i % HAND == 0:
            opt.step()
            if after is not None:
                after(model)
            opt.zero_grad()
    return digest(model.state_dict(), opt.state_dict()["state"])


def by(loss, divisor):
    return loss / divisor if divisor > 1 else loss


def averaged():
    """An average over the weights, once per update."""
    model = network()
    average = AveragedModel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, x in enumerate(batches(), 1):
        by(loss_of(model, x), HAND).backward()
        if i % HAND == 0:
            opt.step()
            average.update_parameters(model)
            opt.zero_grad()
    return digest(model.state_dict(), average.state_dict())


def reentrant(flag):
    def backward(model, x, divisor):
        x = x.clone().requires_grad_(False)
        hidden = checkpoint(model[:2], x, use_reentrant=flag) if not flag else model[:2](x)
        out = checkpoint(model[2], hidden, use_reentrant=flag)
        by((out - x[:, :2]).pow(2).mean(), divisor).backward()

    return plain_loop(backward)


def given(model, x, divisor):
    """A given gradient, not a scalar: by hand it is divided."""
    out = (model(x) - x[:, :2]).pow(2)
    weights = torch.linspace(0.1, 1, out.numel()).view_as(out)
    out.backward(gradient=weights / divisor if divisor > 1 else weights)


def several(model, x, divisor):
    """Two scalar roots at once, one of them with a gradient of its own."""
    first, second = loss_of(model, x), model(x).mean()
    factor = torch.tensor(0.5)
    torch.autograd.backward(
        [by(first, divisor), second], [None, factor / divisor if divisor > 1 else factor]
    )


def taken(model, x, divisor):
    """`autograd.grad`, put into `.grad` by hand."""
    names = list(model.parameters())
    found = torch.autograd.grad(by(loss_of(model, x), divisor), names)
    for p, g in zip(names, found, strict=True):
        p.grad = g if p.grad is None else p.grad + g


def sparse():
    """An embedding with sparse gradients."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    opt = torch.optim.SGD(table.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for i in range(1, BATCHES + 1):
        ids = torch.randint(0, 10, (5,), generator=generator)
        by(table(ids).pow(2).sum(), HAND).backward()
        if i % HAND == 0:
            opt.step()
            opt.zero_grad()
    return digest(table.state_dict())


def conditional():
    """A branch that only some windows use: its gradient is missing in the last one, or alone."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for i, x in enumerate(batches(), 1):
        out = model[0](x) + (model[1](x) if i % 3 == 1 else 0)
        by(out.pow(2).mean(), HAND).backward()
        if i % HAND == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            opt.step()
            opt.zero_grad()
    return digest(model.state_dict(), opt.state_dict()["state"])


def epochs():
    """A scheduler that steps per epoch of five windows, whatever K is."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.9)
    for i, x in enumerate(batches(20), 1):
        by(loss_of(model, x), HAND).backward()
        if i % HAND == 0:
            opt.step()
            opt.zero_grad()
        if i % 5 == 0:
            scheduler.step()
            plateau.step(1.0)
    return digest(model.state_dict(), scheduler.get_last_lr())


def scheduler_first():
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    for i, x in enumerate(batches(), 1):
        if HAND == 1 or i % HAND == 1:
            scheduler.step()
        by(loss_of(model, x), HAND).backward()
        if i % HAND == 0:
            opt.step()
            opt.zero_grad()
    return digest(model.state_dict(), scheduler.get_last_lr())


def accumulate_twice():
    """Windows of two micro-batches: sums in another order, so to rounding only."""
    model = network().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    n = 2 * HAND
    for i, x in enumerate(batches().double(), 1):
        (loss_of(model, x) / n).backward()
        if i % n == 0:
            opt.step()
            opt.zero_grad()
    return "rounded " + " ".join(f"{v:.9f}" for p in model.parameters() for v in p.flatten())


CASES = {
    f"{o}-{k}-{s}-{'clip' if c else 'free'}-{r}": (
        lambda o=o, k=k, s=s, c=c, r=r: matrix(o, k, s, c, r)
    )
    for o, k, s, c, r in itertools.product(
        OPTIMIZERS, KINDS, ("none", "scaled", "unscaled"), (False, True), ("none", "cosine")
    )
    if not (s == "scaled" and c)  # clipping scaled gradients is no recipe
}
CASES |= {
    f"overflow-{o}-{k}-{s}": (
        lambda o=o, k=k, s=s: matrix(o, k, s, s == "unscaled", "cosine", bad=(7, 9))
    )
    for o, k, s in itertools.product(("sgd", "adamw"), KINDS, ("scaled", "unscaled"))
}
CASES |= {f"zeroing-{how}": (lambda how=how: zeroing(how)) for how in
          ("model", "zeros", "none", "in_place", "optimizer")}  # fmt: skip
CASES |= {f"discarded-{how}": (lambda how=how: discarded(how)) for how in
          ("clip", "read", "none", "in_place")}  # fmt: skip
CASES |= {
    "sequential": lambda: matrix("sgd", "loop", "none", False, "sequential"),
    "bf16-loss": lambda: matrix("sgd", "loop", "scaled", False, "none", dtype=torch.bfloat16),
    "gan": gan,
    "averaged": averaged,
    "raised": raised,
    "grown": grown,
    "reentrant": lambda: reentrant(True),
    "checkpoint": lambda: reentrant(False),
    "given": lambda: plain_loop(given),
    "several": lambda: plain_loop(several),
    "taken": lambda: plain_loop(taken),
    "sparse": sparse,
    "conditional": conditional,
    "epochs": epochs,
    "scheduler-first": scheduler_first,
    "twice": accumulate_twice,
}

if __name__ == "__main__":
    for name in sys.argv[3:] or CASES:
        print(name, CASES[name]())
