"""Small loops that zero-code mixed precision does not fit, or only in part: `KIND`.

Prints the weights' hash. With the second word "doubtful" some of them would be changed for one
window before the refusal, which the test knows.
"""

import hashlib
import sys

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        if kind == "autocast_inside":
            with torch.autocast("cpu", torch.bfloat16):
                return self.last(torch.tanh(self.first(x))).float()
        return self.last(torch.tanh(self.first(x)))


model = Net()
inputs = torch.randn(12, 8, 4)
if kind == "half_weights":
    model, inputs = model.bfloat16(), inputs.bfloat16()
parameters = list(model.parameters())
made = kind != "manual"
if kind == "closure":
    optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
elif kind == "in_backward":
    each = {p: torch.optim.SGD([p], lr=0.05) for p in parameters}

    def hook(p):
        each[p].step()
        each[p].zero_grad()

    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)
elif made:
    optimizer = torch.optim.SGD(parameters, lr=0.05)
if kind == "compiled_in_place":
    model.compile(backend="eager")
call = model.forward if kind == "forward_called" else model
if kind == "compiled_function":

    @torch.compile(backend="eager")
    def call(x):
        return model(x)


scaler = torch.amp.GradScaler("cpu", enabled=kind == "own_scaler", init_scale=1024.0)


def loss_of(x):
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast_around"):
        output = call(x)
    return ((output.float() - x.float().sum(1, keepdim=True)) ** 2).mean()


def closure():
    optimizer.zero_grad()
    loss = loss_of(x)
    loss.backward()
    return loss


for x in inputs:
    if kind == "closure":
        optimizer.step(closure)
        continue
    loss = loss_of(x)
    if kind == "autograd_grad":
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
    else:
        scaler.scale(loss).backward()
    if kind == "edited":
        for p in parameters:
            p.grad.clamp_(-1, 1)
    if kind == "manual":
        with torch.no_grad():
            for p in parameters:
                p -= 0.05 * p.grad
                p.grad = None
    elif kind != "in_backward":
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

digest = hashlib.sha256()
for p in parameters:
    digest.update(p.detach().float().numpy().tobytes())
values = torch.cat([p.detach().float().flatten() for p in parameters])
print("WEIGHTS", digest.hexdigest())
print(" ".join(f"{value:.6f}" for value in values.tolist()))
