"""The divisor inside a loss, read from the last node of its graph.

Saved values are read raw: unpacking them could run code of the script (activation checkpointing
recomputes a block on it).
"""

import torch


def divisor_of(loss: torch.Tensor) -> float | None:
    """The whole number >= 2 that the last operation divided `loss` by, or None."""
    node = loss.grad_fn
    if node is None:
        return None
    name = node.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    saved = getattr(node, "_raw_saved_other", None)
    other = getattr(saved, "data", None)
    # Constants of Python become 0-dim CPU tensors; a device's would have to be waited for.
    if type(other) is not torch.Tensor or other.dim() or other.device.type != "cpu":
        return None
    constant = float(other.item())
    divisor = constant if name == "DivBackward0" else (1.0 / constant if constant else 0.0)
    return float(round(divisor)) if divisor >= 2 and abs(divisor - round(divisor)) < 1e-6 else None
