"""The divisor inside a loss and the targets of its mean, read from the last nodes of its graph.

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


def targets_of(loss: torch.Tensor) -> float | None:
    """Over how many targets (those not ignored) a cross entropy took its mean, or None.

    Looks below divisions and scalings by a number; a loss made of anything else is not known.
    """
    node = loss.grad_fn
    for _ in range(4):
        if node is None or node.name() not in _PASSED:
            break
        node = next((edge[0] for edge in node.next_functions if edge[0] is not None), None)
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    total = getattr(getattr(node, "_raw_saved_total_weight", None), "data", None)
    # 1 is "mean"; class weights make the total something else than a number of targets.
    if getattr(node, "_saved_reduction", None) != 1 or type(total) is not torch.Tensor:
        return None
    count = float(total.item()) if total.device.type == "cpu" else 0.0
    return count if count >= 1 and count == int(count) else None


_PASSED = frozenset({"DivBackward0", "MulBackward0", "ToCopyBackward0"})
