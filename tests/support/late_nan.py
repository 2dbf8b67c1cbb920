"""NaN in chosen modules' forwards on a "device" whose numbers arrive late; prints all there is.

    python late_nan.py HOW STEPS MODULE:STEP[-STEP] ...

HOW: `scaler`, `plain` (no scaler), `changed` (the input is changed in place before the step).
A module is broken from STEP on, or from one to the other; `backward` stands for a gradient.
An evaluation-mode encoder layer is part of the model: torch takes
another way through it, with other values, when hooks are on it.
"""

import hashlib
import sys
from collections.abc import Callable

import torch
from torch import nn

from tests.support.late_numbers import be_late

be_late()
how, steps, *broken = sys.argv[1:]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
        self.first = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x, src_key_padding_mask=padding)
        return self.last(self.body(self.first(x)))


padding = torch.tensor([[False, False, False, True]]).expand(3, 4)
model = Net()
model.frozen.eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how != "plain")
digest = hashlib.sha256()
now = 0


def breaker(first: int, last: int) -> Callable[..., torch.Tensor | None]:
    def spoil(module: nn.Module, given: object, output: torch.Tensor) -> torch.Tensor | None:
        return output * float("nan") if first <= now <= last and micro == 1 else None

    return spoil


def spoiler(first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
    return lambda grad: grad * float("inf") if first <= now <= last and micro == 1 else None


for each in broken:
    name, _, when = each.partition(":")
    first, _, last = when.partition("-")
    if name == "backward":
        model.first.weight.register_hook(spoiler(int(first), int(last or 10**6)))
        continue
    model.get_submodule(name).register_forward_hook(breaker(int(first), int(last or 10**6)))
for now in range(1, int(steps) + 1):
    for micro in range(2):  # noqa: B007
        x = torch.randn(3, 4, 8)
        loss = model(x).pow(2).mean() / 2
        scaler.scale(loss).backward()
        if how == "changed":
            x.zero_()
    scaler.step(optimizer)
    scaler.update()
    if how == "plain":
        with torch.no_grad():
            # Nobody skips: keep NaN out of the weights, for the next step to be a new case.
            for value in model.parameters():
                value.nan_to_num_(0.1)
    optimizer.zero_grad()
    print(now, loss.item(), float(scaler.get_scale()))
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.children())
print(digest.hexdigest(), torch.rand(1).item(), hooks)
