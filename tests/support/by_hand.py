"""What loops that accumulate share: the data, the network, and the loop with its division by K.

Read by the parts of `tests.support.accumulated`, whose first two arguments are MODE and K: in
`hand` a window has K micro-batches, in `plain` one, as if K had never been heard of.
"""

import hashlib
import sys

import torch
from torch import nn

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


def batches(count=BATCHES):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, 4, generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, x):
    return (model(x) - x[:, :2]).pow(2).mean()


def by(loss, divisor=HAND):
    """The share of one micro-batch; untouched where nothing is divided."""
    return loss / divisor if divisor > 1 else loss


def begins(i):
    """Whether micro-batch `i` is the first of its window."""
    return HAND == 1 or i % HAND == 1


def usual(model, x):
    by(loss_of(model, x)).backward()


def nothing(*_):
    pass


def train(
    model, optimizer, gradient=usual, data=None, *,
    before=nothing, clip=nothing, stepped=nothing, after=nothing, clears=True,
):  # fmt: skip
    """The loop; `gradient(model, x)` is one micro-batch.

    `before(i)` and `after(i)` are called around each micro-batch, `clip()` and `stepped()` around
    each step; without `clears` somebody else clears the gradients.
    """
    for i, x in enumerate(batches() if data is None else data, 1):
        before(i)
        gradient(model, x)
        if i % HAND == 0:
            clip()
            optimizer.step()
            stepped()
            if clears:
                optimizer.zero_grad()
        after(i)


def added(model, total):
    """`total`, or a new one, with the gradients in `model` added: a sum apart from `.grad`."""
    mine = [p.grad.clone() for p in model.parameters()]
    return mine if total is None else [a.add_(b) for a, b in zip(total, mine, strict=True)]


def put_back(model, total):
    for p, gradient in zip(model.parameters(), total, strict=True):
        p.grad = gradient


def train_on_good(model, optimizer, good):
    """A loop that throws micro-batches away: `good(i, x)` leaves a gradient and says if it is fit.

    By hand those that are fit are summed apart, so that what is thrown away is in no sum.
    """
    count, total = 0, None
    for i, x in enumerate(batches(14), 1):
        if not good(i, x):
            continue
        if HAND > 1:
            total = added(model, total)
            count += 1
            if count % HAND == 0:
                put_back(model, total)
                total = None
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
