"""Time of a window and samples to a target: wide bands where nothing was probed.

Compute from FLOPs and a utilisation band, element-wise work and optimizer from bytes over memory
bandwidth, communication from volume over link bandwidth, overlapped by Pollux's p-norm (OSDI '21).
Everything here is an estimate from data-sheet figures. Works on numbers and on numpy arrays alike.
"""

import math
from typing import Any

from msgspec import Struct

from mpwatch.planner.activations import layer_bytes, selective_overhead
from mpwatch.planner.cards import Card
from mpwatch.planner.footprint import Setup, trained_parameters
from mpwatch.planner.model import TrackedModel, TransformerShape

UTILISATION = (0.55, 0.40, 0.25)
"""Best, middle and worst share of peak FLOP/s that large micro-batches reach; judgement."""
OVERLAP = (10.0, 2.0, 1.0)
"""p-norm of computation and communication: nearly full overlap, partial, none."""
HALF_TOKENS = 512
"""Tokens per micro-batch at which half of that utilisation is reached; judgement."""
PASSES = 3
"""Kept activations are written once, read once, and matched by a gradient of their size."""
FOREACH_TRAFFIC = 80 / 28
"""Bytes moved by foreach AdamW over those of a fused kernel, counted pass by pass."""


class Rates(Struct, frozen=True, kw_only=True):
    """Seconds that do not depend on N: `micro_fixed + micro_sample * b` for each micro-batch."""

    micro_fixed: float
    micro_sample: float
    optimizer: float
    gradient_copy: float
    """Seconds to move one copy of the gradients over the link, large-D limit applied."""
    overlap: float


def flops_per_sample(setup: Setup) -> float | None:
    """6P + 12Lhs per token, with what recomputation adds; None where the shape is unknown."""
    shape = setup.model
    if isinstance(shape, TrackedModel):
        recomputed = 4 / 3 if setup.checkpointing == "full" else 1.0
        return None if shape.flops_per_sample is None else shape.flops_per_sample * recomputed
    if not isinstance(shape, TransformerShape):
        return None
    per_parameter = 4 if setup.lora_rank is not None else 6
    attention = 12 * shape.layers * shape.hidden * shape.sequence
    flops = shape.sequence * (per_parameter * shape.parameters + attention)
    if setup.checkpointing == "full":
        return flops * 4 / 3
    if setup.checkpointing == "selective":
        return flops * (1 + selective_overhead(shape.sequence, shape.hidden))
    return float(flops)


def _kept_bytes(setup: Setup) -> float:
    """Activation bytes per sample without checkpointing: a measure of element-wise traffic."""
    shape = setup.model
    if not isinstance(shape, TransformerShape):
        return 0.0
    layer = layer_bytes(shape, setup.numerics, setup.attention, cuda=setup.cuda)
    return shape.layers * layer.total + 12.0 * shape.sequence * shape.vocabulary


def optimizer_bytes(setup: Setup) -> float:
    """Bytes moved by one step: 28 per parameter for fused AdamW in fp32, more for foreach."""
    numerics, optimizer = setup.numerics, setup.optimizer
    states = optimizer.state_bytes(numerics.states)
    written = numerics.weights + numerics.master + states
    traffic = written + numerics.gradients + numerics.master + numerics.weights + states
    if numerics.master:
        traffic -= numerics.weights  # the step reads the master copy, not the 16-bit one
    factor = 1.0 if optimizer.implementation == "fused" else FOREACH_TRAFFIC
    return trained_parameters(setup) * traffic * factor


def rates(setup: Setup, card: Card, band: int = 1) -> Rates | None:
    """Rates at the best (0), middle (1) or worst (2) end of the band; None without a shape."""
    flops = flops_per_sample(setup)
    if flops is None:
        return None
    tokens = setup.model.sequence if isinstance(setup.model, TransformerShape) else HALF_TOKENS
    peak = card.half_flops if setup.numerics.compute == 2 else card.fp32_flops
    compute = flops / (peak * UTILISATION[band])
    share = setup.devices if setup.sharding in ("zero1", "zero2", "zero3") else 1
    numerics = setup.numerics
    # FSDP moves parameters and gradients in the compute type, the others the gradients as they are.
    width = numerics.compute if setup.sharding == "zero3" else numerics.gradients
    gradient = trained_parameters(setup) * width
    finite = (setup.devices - 1) / setup.devices
    return Rates(
        micro_fixed=compute * HALF_TOKENS / tokens,
        micro_sample=compute + PASSES * _kept_bytes(setup) / card.memory_bandwidth,
        optimizer=optimizer_bytes(setup) / share / card.memory_bandwidth,
        gradient_copy=finite * gradient / card.link_bandwidth,
        overlap=OVERLAP[band],
    )


def traffic_copies(sharding: str, accumulation: Any, *, no_sync: bool = True) -> Any:
    """Copies of the gradients moved per window and rank, large-D limit.

    DDP 2 with no_sync (2N without), ZeRO-1 2, ZeRO-2 N + 1, ZeRO-3 3N. `fsdp-no-sync` is 2N + 1.
    """
    if sharding == "none":
        return accumulation * 0
    if sharding == "ddp":
        return 2 + 0 * accumulation if no_sync else 2 * accumulation
    if sharding == "zero1":
        return 2 + 0 * accumulation
    if sharding == "zero2":
        return accumulation + 1
    return 3 * accumulation if sharding == "zero3" else 2 * accumulation + 1


def window_seconds(speed: Rates, sharding: str, micro_batch: Any, accumulation: Any) -> Any:
    """Seconds of one window of N micro-batches of b samples, synchronisation and step included."""
    micro = speed.micro_fixed + speed.micro_sample * micro_batch
    copies = traffic_copies(sharding, accumulation)
    power = speed.overlap
    if sharding in ("zero2", "zero3"):  # they communicate in every micro-batch
        each = speed.gradient_copy * copies / accumulation
        return accumulation * (micro**power + each**power) ** (1 / power) + speed.optimizer
    last = (micro**power + (speed.gradient_copy * copies) ** power) ** (1 / power)
    return (accumulation - 1) * micro + last + speed.optimizer


def samples_factor(batch: float, noise_scale: float) -> float:
    """Samples to a target over those of very small batches, 1 + B/B_c (arXiv 1812.06162)."""
    return 1 + batch / noise_scale


def best_accumulation(overhead_ratio: float, critical_ratio: float) -> float:
    """N that reaches the target soonest on fixed hardware: sqrt(r c), at least 1.

    Args:
        overhead_ratio: r, optimizer and synchronisation time over one micro-batch's.
        critical_ratio: c, critical batch over b D.
    """
    return max(1.0, math.sqrt(overhead_ratio * critical_ratio))


def soonest_accumulation(
    setup: Setup, card: Card, micro_batch: int, noise_scale: tuple[float, float]
) -> tuple[float, float] | None:
    """N that reaches the target soonest, for both ends of the noise scale; None without a shape.

    What is paid once per window: the step, and for DDP and ZeRO-1 the synchronisation.
    """
    speed = rates(setup, card)
    if speed is None:
        return None
    micro = speed.micro_fixed + speed.micro_sample * micro_batch
    once = speed.optimizer
    if setup.sharding in ("ddp", "zero1"):
        once += 2 * speed.gradient_copy
    samples = micro_batch * setup.devices
    low, high = (best_accumulation(once / micro, end / samples) for end in noise_scale)
    return low, high
