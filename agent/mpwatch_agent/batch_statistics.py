"""Layers whose output depends on who else is in the micro-batch: found and named, never changed.

Accumulation makes one update of several micro-batches but normalises each by itself, and running
statistics move once per micro-batch.
"""

from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mpwatch_agent.diagnoses import Diagnosis

NAMED_AT_MOST = 4


def batch_statistics(modules: list[Any]) -> list[tuple[str, Any]]:
    """(name, layer) of everything in `modules` that looks at its whole batch while training."""
    found = []
    for module in modules:
        for name, layer in module.named_modules():
            tracks = getattr(layer, "track_running_stats", False)
            whole = isinstance(layer, _BatchNorm) and not isinstance(layer, _InstanceNorm)
            if layer.training and (whole or (isinstance(layer, _InstanceNorm) and tracks)):
                found.append((name or type(layer).__name__, layer))
    return found


def named(modules: list[Any], updates_of: int) -> Diagnosis | None:
    """What windows of `updates_of` micro-batches do to the layers of `modules`, or None."""
    layers = batch_statistics(modules)
    if not layers or updates_of < 2:
        return None
    names = ", ".join(name for name, _ in layers[:NAMED_AT_MOST])
    more = f" and {len(layers) - NAMED_AT_MOST} more" if len(layers) > NAMED_AT_MOST else ""
    momenta = [layer.momentum for _, layer in layers if isinstance(layer.momentum, float)]
    moved = ""
    if momenta:
        share = 1 - (1 - momenta[0]) ** updates_of
        moved = (
            f"; running statistics move {updates_of} times per update, by {share:.3f} of the way"
            f" instead of {momenta[0]:g}"
        )
    return Diagnosis(
        "batch_statistics_per_micro_batch",
        "warning",
        f"{names}{more} normalise over each micro-batch, not over the {updates_of} of an update"
        + moved,
        "GroupNorm, or a momentum of 1-(1-m)^(1/N), where the batch matters",
    )
