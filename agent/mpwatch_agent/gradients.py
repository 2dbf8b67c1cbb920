"""The norm of a parameter group's gradients: what a sampled step reports.

Reads, never writes; in fp32 whatever the gradients' type, so that half-precision gradients do not
overflow in the sum. Nothing here waits for a device.
"""

from collections.abc import Iterable
from typing import Any

import torch

_FOREACH = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def gradients_of(optimizer: Any) -> list[torch.Tensor]:
    """The gradients an optimizer would step on now, sparse ones as their values."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            found.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return found


@torch.no_grad()
def norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The 2-norm over all `gradients` as a scalar fp32 tensor on the first one's device.

    Returns:
        None when there is no gradient or one that cannot be read without communicating
        (a subclass such as DTensor).
    """
    plain: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for gradient in gradients:
        if type(gradient) is not torch.Tensor:
            return None
        if gradient.is_complex():
            norms.append(torch.linalg.vector_norm(gradient).float())
        elif gradient.numel() and gradient.dtype in _FOREACH:
            plain.append(gradient)
        elif gradient.numel():
            norms.append(torch.linalg.vector_norm(gradient.float()))
    for same in _by_device(plain).values():
        half = same[0].dtype in (torch.float16, torch.bfloat16)
        found = torch._foreach_norm(same, 2.0, dtype=torch.float32 if half else None)
        norms.extend(norm.float() for norm in found)
    if not norms:
        return None
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(device, non_blocking=True) for n in norms])
    )
    return total


def _by_device(tensors: list[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
