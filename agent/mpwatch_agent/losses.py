"""The loss a script passes to backward: its value before scaling, and the divisor inside it.

`GradScaler.scale` shows the unscaled loss; the graph's last node shows a division or a
multiplication by a constant. Saved values are read raw: unpacking them could run code of the
script (activation checkpointing recomputes a block on it).
"""

from typing import Any

import torch

from mpwatch_agent.device import Reader
from mpwatch_agent.tracks import MicroBatch


class PassedLosses:
    """Unscaled losses between `GradScaler.scale` and the backward that uses its result."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._unscaled: dict[int, Any] = {}

    def scaled(self, outputs: Any, results: Any) -> None:
        """Remember the unscaled losses behind what `scale` returned, until the next backward."""
        if isinstance(outputs, torch.Tensor):
            self._unscaled[id(results)] = outputs
        elif isinstance(outputs, list | tuple):
            for output, result in zip(outputs, results, strict=False):
                self.scaled(output, result)

    def behind(self, root: torch.Tensor) -> torch.Tensor:
        """The unscaled loss behind the root of a backward; what was remembered is used up."""
        if not self._unscaled:
            return root
        loss: torch.Tensor = self._unscaled.get(id(root), root)
        self._unscaled.clear()
        return loss

    def passed_several(self, tensors: Any, micro: MicroBatch) -> None:
        """Read several roots, or one more backward of the same micro-batch, into `micro`."""
        roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
        for root in roots:
            micro.losses.append(self._reader.read(self._unscaled.get(id(root), root)))
        self._unscaled.clear()


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
