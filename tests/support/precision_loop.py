"""One loop in several styles, in fp32 or with mixed precision written by hand: `STYLE HAND`.

HAND is "none" (a script that knows of no mixed precision), "fp16" or "bf16": autocast around the
forward, outputs as fp32, a GradScaler and clipping, as people write it, or "fp16:O2" and "bf16:O2":
a 16-bit copy of the model, fp32 norms and masters. Prints what the weights are in the end.
"""

import copy
import hashlib
import json
import sys
from collections import OrderedDict, namedtuple
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

style, hand = sys.argv[1:3]
init_scale = float(sys.argv[3]) if len(sys.argv) > 3 else 2.0**16
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
dtype = DTYPES.get(hand.split(":")[0])
Output = namedtuple("Output", "value rest")  # as scripts have it

torch.manual_seed(0)


class Packed(OrderedDict):
    """An output of a library: a dict whose values are attributes as well."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.batch = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, 1)

    def body(self, x):
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x):
        if style.startswith("checkpoint"):
            x = checkpoint(self.body, x, use_reentrant=style == "checkpoint_reentrant")
        else:
            x = self.body(x)
        value = self.last(self.drop(self.batch(x)))
        if style == "tuple":
            return Output(value, [value * 2])
        if style == "packed":
            packed = Packed()
            packed["value"], packed["count"] = value, 3
            return packed
        return value


model = Net()
inputs = torch.randn(96, 6)
if style == "checkpoint_reentrant":
    inputs.requires_grad_()
targets = inputs.detach().sum(1, keepdim=True)
size = {"accumulate": 3, "zeros": 2}.get(style, 1)
clips = style not in ("no_clip", "fused_no_clip", "gentle", "list")

masters = {}
halves = model
if hand.endswith(":O2"):
    halves = copy.deepcopy(model)
    for (name, master), half in zip(model.named_parameters(), halves.parameters(), strict=True):
        if not name.startswith(("norm", "batch")):
            half.data = half.data.to(dtype)
        masters[name] = (master, half)

parameters = list(model.parameters())
if style == "several":
    optimizers = [
        torch.optim.AdamW(parameters[:2], lr=0.01),
        torch.optim.SGD(parameters[2:6], lr=0.05, momentum=0.9),
        torch.optim.Adam(parameters[6:], lr=0.01),
    ]
elif style == "gentle":
    optimizers = [torch.optim.SGD(parameters, lr=0.002)]
elif style == "sgd":
    optimizers = [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
else:
    fused = True if style.startswith("fused") else None
    optimizers = [torch.optim.AdamW(parameters, lr=0.01, fused=fused)]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in optimizers]
if dtype is torch.float16:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
else:
    scaler = torch.amp.GradScaler("cpu", enabled=False)


def predict(x):
    if hand == "none":
        return model(x)
    for master, half in masters.values():
        half.data.copy_(master.data)
    with torch.autocast("cpu", dtype) if dtype else nullcontext():
        output = halves(x)
    if style == "tuple":
        return Output(output.value.float(), [output.rest[0].float()])
    if style == "packed":
        output.value = output.value.float()
        return output
    return output.float()


def value_of(output):
    if style == "tuple":
        return output.value + 0 * output.rest[0]
    return output.value if style == "packed" else output


def merge():
    for master, half in masters.values():
        gradient, half.grad = half.grad, None
        if gradient is not None:
            gradient = gradient.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def step():
    if hand == "none" or dtype is torch.bfloat16:
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return True
    before = scaler.get_scale()
    if clips or len(optimizers) > 1:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
    if len(optimizers) > 1:
        # One loss, one decision: where one overflows, none steps.
        states = scaler._per_optimizer_states.values()
        if not any(f.item() for s in states for f in s["found_inf_per_device"].values()):
            for optimizer in optimizers:
                optimizer.step()
    else:
        scaler.step(optimizers[0])
    scaler.update()
    return scaler.get_scale() >= before


applied = []
for index in range(72 if style == "virtual" else 24):
    for part in range(size):
        at = (index * size + part) * 4 % 96
        x, y = inputs[at : at + 4], targets[at : at + 4]
        loss = nn.functional.mse_loss(value_of(predict(x)), y) / size
        if (
            index in ((27, 30) if style == "virtual" else (9, 10))
            and part == 0
            and dtype is not torch.bfloat16
            and hand != "plain"
        ):
            loss = loss * float("inf") if "overflow" in sys.argv else loss
        if index == 9 and "overflow_once" in sys.argv:
            loss = loss * float("inf")
        if style == "list":
            other = (value_of(predict(x)) ** 2).mean()
            torch.autograd.backward([scaler.scale(loss), scaler.scale(other)])
        else:
            scaler.scale(loss).backward()
        merge()
    applied.append(step())
    for scheduler in schedulers:
        scheduler.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=style != "zeros")
    if index % 8 == 7:
        model.eval()
        halves.eval()
        with torch.no_grad():
            predict(inputs[:8])
        model.train()
        halves.train()

digest = hashlib.sha256()
for tensor in parameters:
    digest.update(tensor.detach().numpy().tobytes())
finite = all(tensor.isfinite().all() for tensor in parameters)
print("WEIGHTS", digest.hexdigest(), finite)
if "values" in sys.argv:
    print(json.dumps([tensor.flatten().tolist() for tensor in parameters]))
if dtype is torch.float16:
    print("APPLIED", "".join(str(int(a)) for a in applied))
    print("SCALE", scaler.get_scale())
