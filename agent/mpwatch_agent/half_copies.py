"""Weights in 16 bits: copies that only a forward sees (O2), or the weights themselves (O3).

With O2 the script's own parameters are the fp32 masters: its optimizer updates them and its
`state_dict()` holds them. During a root's forward the modules hold 16-bit copies in their place,
whose gradients are moved to the masters, in fp32, after each backward.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mpwatch_agent.casting import HALVES

_NORM = re.compile(r"Norm(\d|Act)?(\dd)?$")


class HalfCopies:
    """The copies of one root's floating fp32 parameters; those of norms stay as they are."""

    def __init__(self, root: nn.Module, dtype: torch.dtype) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []
        self._pairs: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for module in root.modules():
            if is_norm(module):
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                pair = self._pairs.get(id(parameter))
                if pair is None:
                    copy = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    pair = self._pairs[id(parameter)] = (parameter, copy)
                self._places.append((module, name, *pair))

    def __len__(self) -> int:
        return len(self._pairs)

    def put_in(self) -> None:
        """A forward begins: copies are what masters are now, and modules hold them."""
        pairs = self._pairs.values()
        with torch.no_grad():
            # Through `data`: an earlier forward's graph may still hold the copies.
            copies = [copy.data for _, copy in pairs]
            torch._foreach_copy_(copies, [master.data for master, _ in pairs])
        for master, copy in pairs:
            if copy.requires_grad != master.requires_grad:
                copy.requires_grad_(master.requires_grad)
        for module, name, master, copy in self._places:
            if module._parameters.get(name) is master:
                module._parameters[name] = copy  # type: ignore[assignment]

    def take_out(self) -> None:
        """The forward ended: modules hold the masters again."""
        for module, name, master, copy in self._places:
            if module._parameters.get(name) is copy:
                module._parameters[name] = master

    def move_gradients(self) -> None:
        """A backward ended: what reached the copies goes to the masters."""
        with torch.no_grad():
            for master, copy in self._pairs.values():
                gradient, copy.grad = copy.grad, None
                if gradient is None:
                    continue
                if master.grad is None:
                    master.grad = gradient.float()
                else:
                    master.grad.add_(gradient)


def convert(root: nn.Module, dtype: torch.dtype) -> None:
    """Make every floating parameter of `root` 16 bits wide itself (O3)."""
    for parameter in root.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def convert_back(roots: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Make weights, gradients and optimizer state fp32 again, so that the script can go on."""
    for root in roots:
        for parameter in root.parameters():
            if parameter.dtype in HALVES:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.float()
                parameter.grad = None if gradient is None else gradient.float()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype in HALVES:
                    state[name] = value.float()


def is_norm(module: nn.Module) -> bool:
    """Whether this is a normalisation, by its class or any class it derives from."""
    return any(_NORM.search(kind.__name__) for kind in type(module).__mro__)
