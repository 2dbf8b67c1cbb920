"""Loops in which accumulation must be refused by name, one per run; they print their weights."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
style = sys.argv[1]


def optimizer_of(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def loss_of(x):
    return (model(x) - x[:, :2]).pow(2).mean()


data = torch.randn(12, 6, 4)
if style == "closure":
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x in data:

        def closure(x=x):
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            return loss

        optimizer.step(closure)
elif style == "in_backward":
    optimizers = {p: optimizer_of([p]) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x in data:
        loss_of(x).backward()
elif style == "compiled_step":
    optimizer = optimizer_of(model.parameters())

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    for x in data:
        loss_of(x).backward()
        step()
        optimizer.zero_grad()
elif style == "manual":
    for x in data:
        loss_of(x).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
elif style == "input_gradient":
    optimizer = optimizer_of(model.parameters())
    for x in data:
        x.requires_grad_()
        loss_of(x).backward()
        loss_of((x + x.grad).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
elif style == "gradient_edge":
    optimizer = optimizer_of(model.parameters())
    for x in data:
        loss = loss_of(x)
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
        optimizer.step()
        optimizer.zero_grad()
elif style == "stepped_twice":
    optimizer = optimizer_of(model.parameters())
    for x in data:
        loss_of(x).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
elif style == "late_closure":
    # What is kept when it comes is divided by what has arrived.
    optimizer = optimizer_of(model.parameters(), lr=1.0)
    for i, x in enumerate(data[:4]):
        loss = loss_of(x)
        loss.backward()
        if i < 2:
            optimizer.step()
        else:
            optimizer.step(lambda loss=loss: loss)
        optimizer.zero_grad()
elif style == "never_cleared":
    optimizer = optimizer_of(model.parameters())
    for x in data:
        loss_of(x).backward()
        optimizer.step()
elif style == "clipped_early":
    optimizer = optimizer_of(model.parameters())
    for pair in data.view(6, 2, 6, 4):
        for x in pair:
            loss_of(x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
print(" ".join(f"{v:.6f}" for p in model.parameters() for v in p.flatten()))
print(sum((p * p).sum() for p in model.parameters()).item().hex())
