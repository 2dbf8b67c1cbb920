"""Gradients that carry a loss scale: seeded with it, looked at and divided by it again.

Operations only; when each is due is `in_flight`'s to know. The same kernels and the same rounding
as `torch.amp.GradScaler`, so that weights are the same bit for bit.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from mpwatch_agent.steering import Arguments

_Seeds = dict[tuple[torch.device, torch.dtype, tuple[int, ...]], torch.Tensor]


class Seeds:
    """What backwards begin with instead of 1: the scale, as tensors made once per scale."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._seeds: _Seeds = {}

    def seeded(self, arguments: Arguments, scale: float) -> Arguments:
        """The arguments of `torch.autograd.backward`, every gradient times `scale`."""
        if scale != self._scale:
            self._scale = scale
            self._seeds.clear()
        args, kwargs = arguments
        tensors = args[0] if args else kwargs.get("tensors")
        given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if given is None:
            given = kwargs.get("grad_variables")
        roots = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
        gradients = [*given] if isinstance(given, list | tuple) else [given] * len(roots)
        if len(gradients) != len(roots):
            # torch says itself what is wrong with these.
            return arguments
        made = tuple(self._seed(*pair) for pair in zip(roots, gradients, strict=True))
        seeds: Any = made if isinstance(tensors, list | tuple) else made[0]
        named = {key: value for key, value in kwargs.items() if key != "grad_variables"}
        if len(args) > 1:
            return (args[0], seeds, *args[2:]), named
        return args, {**named, "grad_tensors": seeds}

    def _seed(self, root: Any, gradient: Any) -> Any:
        if isinstance(gradient, torch.Tensor):
            return gradient * self._scale
        if not isinstance(root, torch.Tensor) or root.numel() != 1 or root.is_complex():
            # Nothing can be made up for these; without a gradient torch refuses them.
            return gradient
        key = (root.device, root.dtype, tuple(root.shape))
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(root, self._scale, requires_grad=False)
        return self._seeds[key]


def gradients_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """The dense values of every gradient of these optimizers, each once."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    found[id(gradient)] = gradient
    return [_dense(gradient) for gradient in found.values()]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def multiply(gradients: list[torch.Tensor], factor: float) -> None:
    """All gradients times `factor`, in place."""
    for gradient in gradients:
        gradient.mul_(factor)


def unscale(gradients: list[torch.Tensor], scale: float) -> bool:
    """Divide by `scale` in place; whether any value is not finite. Reads one number per device."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found: dict[torch.device, torch.Tensor] = {}
    for (device, _), group in groups.items():
        flag = found.get(device)
        if flag is None:
            flag = found[device] = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, _inverse(scale, device))
    # Stepping or skipping must be known now: one wait per device and step, as torch's scaler has.
    return any(flag.item() for flag in found.values())


@functools.lru_cache(maxsize=16)
def _inverse(scale: float, device: torch.device) -> torch.Tensor:
    # Rounded once, from the double reciprocal, as torch's scaler has it.
    return torch.full((), 1.0 / scale, dtype=torch.float32, device=device)


def largest(gradients: list[torch.Tensor]) -> float | None:
    """The largest magnitude; None where there is none. One batched pass and one read per device."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault(gradient.device, []).append(gradient)
    peaks = [
        torch.stack([norm.float() for norm in torch._foreach_norm(group, float("inf"))]).max()
        for group in groups.values()
    ]
    return max((float(peak) for peak in peaks), default=None)
