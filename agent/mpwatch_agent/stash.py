"""Sums of gradients of swallowed script windows, kept beside `p.grad`.

The script's own gradients are copied at a swallowed step and stay where they are, for the script
to clear in its own way; the sum is added to them once, before the last window's unscale, clip or
step. Knows no windows: `accumulation` says when.
"""

from typing import Any

import torch

_Tensor, _STRIDED = torch.Tensor, torch.strided


class Entry:
    """The sum for one parameter; `version` is the sum's own, as we left it."""

    __slots__ = ("parameter", "plain", "total", "version")

    def __init__(self, parameter: Any, total: torch.Tensor) -> None:
        self.parameter = parameter
        self.total = total
        self.version = total._version
        self.plain = is_plain(total)


class Stash:
    """One optimizer's sums."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    @torch.no_grad()
    def add(self, optimizer: Any, divisor: int = 1) -> None:
        """Add the gradients of `optimizer`, divided by `divisor`."""
        totals: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        touched: list[Entry] = []
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            if divisor != 1:
                gradient = gradient / divisor
            entry = self.entries.get(id(parameter))
            if entry is None:
                self.entries[id(parameter)] = Entry(parameter, gradient.detach().clone())
            elif entry.plain and type(gradient) is _Tensor and gradient.layout is _STRIDED:
                totals.append(entry.total)
                gradients.append(gradient)
                touched.append(entry)
            else:
                # Sparse gradients and subclasses: in the order in which autograd adds them.
                entry.total = entry.total + gradient
                entry.plain = is_plain(entry.total)
                entry.version = entry.total._version
        if totals:
            torch._foreach_add_(totals, gradients)
            for entry in touched:
                entry.version = entry.total._version

    @torch.no_grad()
    def merge(self, optimizer: Any, *, in_place: bool = True) -> None:
        """Add the sums to the gradients of `optimizer`; the sums stay as they are."""
        totals: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for parameter in parameters_of(optimizer):
            entry = self.entries.get(id(parameter))
            if entry is None:
                continue
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = entry.total.clone()
            elif in_place and is_plain(gradient) and is_plain(entry.total):
                totals.append(entry.total)
                gradients.append(gradient)
            else:
                parameter.grad = entry.total + gradient
        if totals:
            torch._foreach_add_(gradients, totals)

    @torch.no_grad()
    def scale(self, factor: Any) -> None:
        """Multiply every sum by `factor`, a number or a tensor of one element."""
        for entry in self.entries.values():
            entry.total.mul_(factor)
            entry.version = entry.total._version

    def untouched(self) -> bool:
        """Whether nobody has written into a sum since we did."""
        return all(entry.total._version == entry.version for entry in self.entries.values())

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of `optimizer`, in the order of its groups."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [*groups[0]["params"]]
    return [p for group in groups for p in group["params"]]


@torch.no_grad()
def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply the gradients of `optimizer` by `factor`."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def is_plain(tensor: Any) -> bool:
    """Whether `tensor` is a dense one of no special kind."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided
