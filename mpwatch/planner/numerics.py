"""Precisions, optimizers and sharding: bytes per parameter that live through the whole step.

The table is the standard accounting (ZeRO, arXiv 1910.02054 section 3; Megatron; 8-bit Adam,
arXiv 2110.02861). Two published accountings that round differently, DeepSpeed's estimator and
Megatron's, stand beside it as plain functions and are never mixed into a plan.
"""

from msgspec import Struct

from mpwatch.errors import UsageError

EXACT, LORA, EIGHT_BIT, PURE_HALF = "exact", "lora", "8bit", "pure_half"
FAMILIES = (EXACT, EIGHT_BIT, LORA, PURE_HALF)
"""Families in the order of what they give up; only `exact` leaves the learning problem alone."""

RISKS = {
    EXACT: "none: same learning problem",
    EIGHT_BIT: "optimizer moments quantised to 8 bits",
    LORA: "only low-rank adapters are trained",
    PURE_HALF: "weights and moments in 16 bits: small updates are lost",
}


class Numerics(Struct, frozen=True, kw_only=True):
    """One precision: bytes per parameter and per activation element."""

    name: str
    weights: int
    master: int
    gradients: int
    compute: int
    """Bytes of a value inside matrix products and between them."""
    residual: int
    """Bytes of the residual stream: fp32 under autocast, since the embedding is not autocast."""
    states: int
    """Bytes of one optimizer moment."""
    casts: bool = False
    """Autocast keeps a 16-bit copy of each matrix weight from forward to backward."""

    @property
    def level(self) -> str:
        """`O0` .. `O3`."""
        return self.name[:2]


def _numerics(name: str, *values: int, casts: bool = False) -> Numerics:
    fields = ("weights", "master", "gradients", "compute", "residual", "states")
    return Numerics(name=name, casts=casts, **dict(zip(fields, values, strict=True)))


PRECISIONS = {
    row.name: row
    for row in (
        _numerics("O0", 4, 0, 4, 4, 4, 4),
        *(_numerics(f"O1:{half}", 4, 0, 4, 2, 4, 4, casts=True) for half in ("bf16", "fp16")),
        *(_numerics(f"O2:{half}", 2, 4, 2, 2, 2, 4) for half in ("bf16", "fp16")),
        *(_numerics(f"O3:{half}", 2, 0, 2, 2, 2, 2) for half in ("bf16", "fp16")),
    )
}


class Optimizer(Struct, frozen=True, kw_only=True):
    """One optimizer and the way it is implemented."""

    name: str
    moments: int
    """State tensors per parameter."""
    implementation: str
    """`foreach` (torch's default on CUDA), `fused`, or `loop`."""
    block: int | None = None
    """Elements that share one quantisation constant; None: moments are not quantised."""
    scratch: bool = True
    """Adam needs a temporary of the parameters' size (the root of v); SGD works in place."""

    def state_bytes(self, moment_bytes: int) -> float:
        """Bytes per parameter: 8 for Adam in fp32, 2 + 8/block where quantised."""
        if self.block is not None:
            return self.moments * (1 + 4 / self.block)
        return float(self.moments * moment_bytes)


OPTIMIZERS = {
    row.name: row
    for row in (
        Optimizer(name="adamw-foreach", moments=2, implementation="foreach"),
        Optimizer(name="adamw-fused", moments=2, implementation="fused"),
        Optimizer(name="adamw-loop", moments=2, implementation="loop"),
        Optimizer(name="adamw-8bit", moments=2, implementation="fused", block=256),
        Optimizer(name="sgd-momentum", moments=1, implementation="foreach", scratch=False),
        Optimizer(name="sgd", moments=0, implementation="foreach", scratch=False),
    )
}

SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3")
"""`zero3` is also FSDP with full sharding; `none` is one device."""


def find_precision(name: str) -> Numerics:
    """The precision of that name; `O1` alone means `O1:bf16`. Raises UsageError."""
    key = name if ":" in name or name == "O0" else f"{name}:bf16"
    if key not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}: one of {', '.join(PRECISIONS)}")
    return PRECISIONS[key]


def find_optimizer(name: str) -> Optimizer:
    """The optimizer of that name. Raises UsageError."""
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}: one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def shards(sharding: str, devices: int) -> tuple[int, int, int]:
    """Over how many devices (weights, gradients, states and master) are divided."""
    if sharding not in SHARDINGS:
        raise UsageError(f"unknown sharding {sharding!r}: one of {', '.join(SHARDINGS)}")
    return (
        devices if sharding == "zero3" else 1,
        devices if sharding in ("zero2", "zero3") else 1,
        devices if sharding in ("zero1", "zero2", "zero3") else 1,
    )


def static_bytes(
    parameters: float, numerics: Numerics, optimizer: Optimizer, sharding: str, devices: int
) -> dict[str, float]:
    """Bytes per device that live through the step, gradients included.

    For O2 with Adam: 16P whole, 4P + 12P/D, 2P + 14P/D, 16P/D for ZeRO 1, 2, 3.
    """
    weights, gradients, states = shards(sharding, devices)
    return {
        "weights": parameters * numerics.weights / weights,
        "master": parameters * numerics.master / states,
        "gradients": parameters * numerics.gradients / gradients,
        "states": parameters * optimizer.state_bytes(numerics.states) / states,
    }


def deepspeed_estimate(
    parameters: float, largest_layer: float, devices: int, *, stage: int, offload: str = "none"
) -> float:
    """Bytes per device by DeepSpeed's own estimator (its memory page): fp32 gradients at the step.

    Args:
        stage: 2 or 3. offload: `none`, `optimizer`, or `all` (stage 3: parameters too).
    """
    if stage == 2:
        whole = 4 * parameters + 16 * parameters / devices
        return whole if offload == "none" else 2 * parameters
    per_parameter = {"none": 18, "optimizer": 2, "all": 0}[offload]
    return 4 * largest_layer + per_parameter * parameters / devices


def megatron_bytes_per_parameter(devices: int = 1) -> float:
    """Megatron-LM with fp32 main gradients: 18, or 6 + 12/d with the distributed optimizer."""
    return 6 + 12 / devices


def lora_parameters(layers: int, hidden: int, rank: int, *, matrices: int = 2) -> int:
    """Adapter parameters, rank * (d_in + d_out) for each adapted h x h matrix (Wq and Wv)."""
    return layers * matrices * rank * 2 * hidden
