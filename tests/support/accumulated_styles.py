"""Loops that accumulate with every style of clearing, giving up, and making gradients."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.support.by_hand import (
    BATCHES,
    HAND,
    batches,
    begins,
    by,
    digest,
    loss_of,
    network,
    train,
    train_on_good,
)


def clear(model, optimizer, how):
    """One of five ways to clear gradients."""
    if how == "model":
        model.zero_grad()
    elif how == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif how == "none":
        for p in model.parameters():
            p.grad = None
    elif how == "in_place":
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
    else:
        optimizer.zero_grad()


def zeroing(how):
    """Gradients are cleared at the beginning of a window."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, opt, before=lambda i: begins(i) and clear(model, opt, how), clears=False)
    return digest(model.state_dict(), opt.state_dict()["state"])


def discarded(how):
    """The script throws windows 3 and 8 away, as not finite by the norm of a clip or its own."""
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def good(i, x):
        by(loss_of(model, x * float("inf") if i in (3, 8) else x)).backward()
        if how == "clip":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if torch.isfinite(norm):
            return True
        clear(model, opt, how)
        return False

    train_on_good(model, opt, good)
    return digest(model.state_dict(), opt.state_dict()["state"])


def raised():
    """A backward raises half-way at windows 3 and 8; the script clears and goes on."""
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    broken = False

    def break_off(gradient):
        if broken:
            raise ValueError("out of memory, say")

    model[0].weight.register_hook(break_off)

    def good(i, x):
        nonlocal broken
        broken = i in (3, 8)
        try:
            by(loss_of(model, x)).backward()
        except ValueError:
            opt.zero_grad()
            return False
        return True

    train_on_good(model, opt, good)
    return digest(model.state_dict(), opt.state_dict()["state"])


def grown():
    """A layer joins the optimizer in the middle of a window."""
    model = network()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    def join(i):
        if i == 1:
            opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    train(model, opt, before=join)
    return digest(model.state_dict(), opt.state_dict()["state"])


def averaged():
    """An average over the weights, once per update."""
    model = network()
    average = AveragedModel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, opt, stepped=lambda: average.update_parameters(model))
    return digest(model.state_dict(), average.state_dict())


def with_gradient(gradient):
    """The plain loop, with another way to make gradients."""
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, opt, gradient)
    return digest(model.state_dict(), opt.state_dict()["state"])


def reentrant(flag):
    def gradient(model, x):
        x = x.clone().requires_grad_(False)
        hidden = model[:2](x) if flag else checkpoint(model[:2], x, use_reentrant=flag)
        out = checkpoint(model[2], hidden, use_reentrant=flag)
        by((out - x[:, :2]).pow(2).mean()).backward()

    return with_gradient(gradient)


def given(model, x):
    """A given gradient, not a scalar: by hand it is divided."""
    out = (model(x) - x[:, :2]).pow(2)
    out.backward(gradient=by(torch.linspace(0.1, 1, out.numel()).view_as(out)))


def several(model, x):
    """Two scalar roots at once, one of them with a gradient of its own."""
    first, second = loss_of(model, x), model(x).mean()
    torch.autograd.backward([by(first), second], [None, by(torch.tensor(0.5))])


def taken(model, x):
    """`autograd.grad`, put into `.grad` by hand."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(by(loss_of(model, x)), parameters)
    for p, g in zip(parameters, found, strict=True):
        p.grad = g if p.grad is None else p.grad + g


def sparse():
    """An embedding with sparse gradients."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    opt = torch.optim.SGD(table.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 10, (5,), generator=generator) for _ in range(BATCHES)]
    train(table, opt, lambda model, ids: by(model(ids).pow(2).sum()).backward(), data)
    return digest(table.state_dict())


def conditional():
    """A branch that only some windows use: its gradient is missing in the last one, or alone."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)

    def gradient(_, numbered):
        i, x = numbered
        out = model[0](x) + (model[1](x) if i % 3 == 1 else 0)
        by(out.pow(2).mean()).backward()

    clip = nn.utils.clip_grad_norm_
    data = enumerate(batches(), 1)
    train(model, opt, gradient, data, clip=lambda: clip(model.parameters(), 0.2))
    return digest(model.state_dict(), opt.state_dict()["state"])


def epochs():
    """A scheduler that steps per epoch of five windows, whatever K is."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.9)

    def after(i):
        if i % 5 == 0:
            scheduler.step()
            plateau.step(1.0)

    train(model, opt, data=batches(20), after=after)
    return digest(model.state_dict(), scheduler.get_last_lr())


def scheduler_first():
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    train(model, opt, before=lambda i: scheduler.step() if begins(i) else None)
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
