"""Which gradients are not finite: looked at in place, many at once, with one read at the end.

Reads, never writes. What cannot be read without communicating (a subclass such as DTensor) is
left out. Called by `locating` after an overflow and by `micro_flags` within a window.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Tensors up to so many elements are watched whole, of larger ones a block.
WHOLE = 4096
BLOCK = 64
_set_grad_enabled = torch._C._set_grad_enabled
_flattened = torch._C._nn.flatten_dense_tensors


class Extremes(NamedTuple):
    """The smallest and the largest value of one gradient; NaN where any value is NaN."""

    low: float
    high: float

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def kind(self) -> str:
        """ "nan" where any value is NaN, else "inf". Only of what is not finite."""
        return "nan" if math.isnan(self.low) or math.isnan(self.high) else "inf"

    @property
    def magnitude(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


def values_of(gradient: Any) -> torch.Tensor | None:
    """The real numbers of a gradient; None where they cannot or need not be read."""
    if type(gradient) is not torch.Tensor or gradient.is_meta:
        return None
    if gradient.layout is not torch.strided:
        if not gradient.is_sparse:
            return None
        gradient = gradient._values()
    if not gradient.numel():
        return None
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


@torch.no_grad()
def extremes_of(gradients: Sequence[torch.Tensor]) -> list[Extremes]:
    """The extremes of each of `gradients` (as `values_of` gives them), in one read per device."""
    found: dict[int, Extremes] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, gradient in enumerate(gradients):
        by_device.setdefault(gradient.device, []).append(index)
    for indices in by_device.values():
        ends = [torch.stack(torch.aminmax(gradients[index])).float() for index in indices]
        for index, (low, high) in zip(indices, torch.stack(ends).tolist(), strict=True):
            found[index] = Extremes(low, high)
    return [found[index] for index in range(len(gradients))]


@torch.no_grad()
def count_non_finite(gradient: torch.Tensor) -> tuple[int, int]:
    """(values that are Inf, values that are NaN)"""
    return int(torch.isinf(gradient).sum()), int(torch.isnan(gradient).sum())


@torch.no_grad()
def watched_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A number on the device that is finite if the watched values are.

    Watched are all tensors of up to `WHOLE` elements and a block of each larger one. Sums of
    finite fp32 gradients do not overflow. None where nothing can be watched.
    """
    return _sum([g if g.numel() <= WHOLE else _block(g) for g in gradients])


def _block(gradient: torch.Tensor) -> torch.Tensor:
    """A small part of a large gradient, as a view."""
    if gradient.is_contiguous():
        return gradient.as_strided((BLOCK,), (1,), gradient.storage_offset())
    while gradient.numel() > WHOLE and gradient.dim():
        gradient = gradient.select(0, 0) if gradient.dim() > 1 else gradient[:BLOCK]
    return gradient


@torch.no_grad()
def whole_sum(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """As `watched_sum`, over every element: a sum of norms.

    The norm of finite fp32 gradients beyond 1e19 is Inf; nobody trains on those.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    sums = [
        torch.stack(torch._foreach_norm(same, 2.0, dtype=_accumulates_in(same[0]))).sum()
        for same in groups.values()
    ]
    return _total(sums)


class Watched:
    """How the gradients of one optimizer can be watched, found out once so that it takes little.

    `plain`: dense, of one type, on one device; later looks take that for granted.
    """

    def __init__(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # By group, as they were: asking each gradient for its size would take as long again.
        self._large = [[p.numel() > WHOLE for p in g["params"]] for g in optimizer.param_groups]
        gradients = [p.grad for p in parameters if p.grad is not None]
        kinds = {(type(g), g.layout, g.device, g.dtype) for g in gradients}
        first = gradients[0] if gradients else None
        self.plain = (
            first is not None
            and len(kinds) == 1
            and type(first) is torch.Tensor
            and first.layout is torch.strided
            and first.dtype in (torch.float32, torch.float64)
            and all(gradient.is_contiguous() for gradient in gradients)
        )

    def is_of(self, optimizer: Any) -> bool:
        """Whether the optimizer still has as many parameters in its groups."""
        groups, known = optimizer.param_groups, self._large
        if len(groups) != len(known):
            return False
        for group, sizes in zip(groups, known, strict=True):
            if len(group["params"]) != len(sizes):
                return False
        return True

    def look(self, optimizer: Any) -> torch.Tensor | None:
        """As `watched_sum` of the gradients that are there now."""
        # Not by `torch.no_grad`, whose calls of Python would be most of what this takes.
        enabled = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            pieces = [
                g.as_strided((BLOCK,), (1,)) if large and g.numel() > WHOLE else g
                for group, sizes in zip(optimizer.param_groups, self._large, strict=True)
                for p, large in zip(group["params"], sizes, strict=True)
                if (g := p.grad) is not None
            ]
            return _flattened(pieces).sum() if pieces else None
        finally:
            _set_grad_enabled(enabled)

    def look_at_all(self, optimizer: Any) -> tuple[torch.Tensor, ...]:
        """The norms of the gradients that are there now: finite where all of a gradient is."""
        enabled = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            try:
                return tuple(torch._foreach_norm(gradients))
            except TypeError:
                # Some have none; looking for them each time would take as long as the norms.
                there = [gradient for gradient in gradients if gradient is not None]
                return tuple(torch._foreach_norm(there)) if there else ()
        finally:
            _set_grad_enabled(enabled)


def _sum(pieces: list[torch.Tensor]) -> torch.Tensor | None:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for piece in pieces:
        groups.setdefault((piece.device, piece.dtype), []).append(piece)
    sums = []
    for same in groups.values():
        flat = _flattened(same)
        sums.append(flat.sum(dtype=_accumulates_in(flat)))
    return _total(sums)


def _accumulates_in(tensor: torch.Tensor) -> torch.dtype | None:
    """Half-precision sums would overflow by themselves."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _total(sums: list[torch.Tensor]) -> torch.Tensor | None:
    if len(sums) <= 1:
        return sums[0] if sums else None
    device = sums[0].device
    return torch.stack([each.to(device, torch.float32, non_blocking=True) for each in sums]).sum()
