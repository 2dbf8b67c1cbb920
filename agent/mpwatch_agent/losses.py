"""Losses as the script passes them to backward: values, divisors, targets of a mean.

Divisors and targets are read from the last nodes of the graph.

Saved values are read raw: unpacking them could run code of the script (activation checkpointing
recomputes a block on it).
"""

from typing import Any

import torch

from mpwatch_agent.device import Reader
from mpwatch_agent.tracks import MicroBatch, OptimizerTrack

# A divisor is looked for in the first windows, then in every fiftieth.
DIVISOR_WINDOWS = 5
DIVISOR_EVERY = 50


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


class Losses:
    """What the script passes to backward, read before the graph is gone.

    `unscaled` has (scaled, unscaled) losses by the identity of the scaled one, which is held with
    them so that no other tensor can take its identity; `half` says that a loss in fp16 was scaled.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.unscaled: dict[int, tuple[Any, Any]] = {}
        self.half = False
        self.factor: float | None = None

    def scaled(self, outputs: Any, results: Any) -> None:
        """`GradScaler.scale` of an enabled scaler returned for several losses at once."""
        if isinstance(outputs, torch.Tensor):
            self.unscaled[id(results)] = (results, outputs)
        elif isinstance(outputs, list | tuple):
            for output, result in zip(outputs, results, strict=False):
                self.scaled(output, result)

    def hear(
        self, tensors: Any, micro: MicroBatch, leader: OptimizerTrack | None, *, first: bool
    ) -> None:
        """A backward of `micro` begins; `first`: the first one of its window."""
        unscaled = self.unscaled
        roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
        for root in roots:
            pair = unscaled.get(id(root))
            loss = root
            if pair is not None:
                loss = pair[1]
                self.half = self.half or loss.dtype is torch.float16
            micro.losses.append(self._reader.read(loss))
        if len(micro.losses) == 1 and type(loss) is torch.Tensor and _may_be_divided(leader):
            if first:
                micro.divisor = divisor_of(loss)
            micro.targets = targets_of(loss)
        if unscaled:
            unscaled.clear()

    def window_is_worth(self, factor: float) -> None:
        """The open window's loss is `factor` times the sum of what was passed to backward."""
        self.factor = factor

    def take_factor(self) -> float | None:
        """What `window_is_worth` said of the window that ends now."""
        factor, self.factor = self.factor, None
        return factor

    def forget(self) -> None:
        """Let go of losses that no backward has used: they hold graphs."""
        self.unscaled.clear()


def _may_be_divided(leader: OptimizerTrack | None) -> bool:
    """Whether to look for a divisor in this window's first loss: dear, so not in each one."""
    if leader is None or leader.steps < DIVISOR_WINDOWS:
        return True
    return leader.usual_window != 1 and leader.steps % DIVISOR_EVERY == 0
