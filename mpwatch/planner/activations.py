"""Bytes of activations a transformer keeps for backward: the paper's formulas and torch's.

`paper_*` are Korthikanti et al., arXiv 2205.05198 (16-bit, 1-byte dropout masks). `layer_bytes` is
what eager torch keeps, per sample: on CPU equal to tracked runs, on CUDA derived from the autocast
operator lists and not measured. Symbols: s length, b micro-batch, h width, a heads, f MLP width.
"""

from msgspec import Struct

from mpwatch.planner.model import TransformerShape
from mpwatch.planner.numerics import Numerics

ATTENTIONS = ("math", "sdpa")
CHECKPOINTINGS = ("none", "selective", "full")


def paper_layer(s: int, b: int, h: int, a: int, t: int = 1, variant: str = "none") -> float:
    """Bytes per layer of table 2 of the paper; `t` is the tensor-parallel size.

    Variants: none (t ignored), tensor, sequence, tensor+selective, sequence+selective, full.
    """
    core = 5 * a * s / h
    factor = {
        "none": 34 + core,
        "tensor": 10 + 24 / t + core / t,
        "sequence": 34 / t + core / t,
        "tensor+selective": 10 + 24 / t,
        "sequence+selective": 34 / t,
        "full": 2,
    }[variant]
    return s * b * h * factor


def paper_interleave(stages: int, chunks: int) -> float:
    """Factor on the first stage's activations with an interleaved pipeline schedule."""
    return 1 + (stages - 1) / (stages * chunks)


def paper_head(s: int, b: int, h: int, v: int, t: int = 1) -> float:
    """Head and cross-entropy beside the layers, without a pipeline: 4sbh/t (1 + v/h)."""
    return 4 * s * b * h / t * (1 + v / h)


def selective_saving(s: int, h: int, a: int) -> float:
    """Share of activation memory that recomputing the attention core saves."""
    core = 5 * a * s / h
    return core / (34 + core)


def selective_overhead(s: int, h: int) -> float:
    """Extra FLOPs of selective recomputation, as a share of the whole."""
    return (1 + s / (3 * h)) / (1 + s / (6 * h)) - 1


class LayerBytes(Struct, frozen=True, kw_only=True):
    """Bytes per sample that one layer keeps, split as the backward pass releases them."""

    mlp: float
    """Second norm and MLP, released first."""
    attention: float
    """First norm, projections and attention output."""
    core: float
    """The part between queries and context: softmax, dropout, or the log-sum-exp."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.mlp + self.attention + self.core


def _core(shape: TransformerShape, numerics: Numerics, attention: str, *, cuda: bool) -> float:
    """Bytes per sample between queries and context."""
    if attention == "sdpa":
        return 4.0 * shape.heads * shape.sequence
    scores = shape.heads * shape.sequence**2
    softmax = numerics.compute
    if numerics.casts and cuda:
        softmax += 4  # on CUDA softmax is an fp32 operator: its result and the 16-bit copy
    if shape.dropout:
        softmax += numerics.compute + (1 if cuda else numerics.compute)
    return float(scores * softmax)


def norm_statistics(shape: TransformerShape, numerics: Numerics, *, cuda: bool) -> float:
    """Bytes per sample of one norm's statistics: mean and 1/sd, in fp32 (CPU: in the input's)."""
    width = numerics.residual if not cuda else 4
    return float(shape.sequence * width * (2 if shape.biases else 1))


def layer_bytes(
    shape: TransformerShape, numerics: Numerics, attention: str, *, cuda: bool, lora: bool = False
) -> LayerBytes:
    """What one layer keeps per sample.

    Half precision, classic block: sh(32 + 2as/h) with math attention, sh(32 + 4a/h) with SDPA;
    twice that in fp32; 36 for 32 under autocast. Frozen linear layers do not keep their inputs.
    """
    elements = shape.sequence * shape.hidden
    compute, residual = numerics.compute, numerics.residual
    mask = (1 if cuda else compute) * elements if shape.dropout else 0
    statistics = norm_statistics(shape, numerics, cuda=cuda)
    wide = shape.sequence * shape.intermediate * compute
    kept_inputs = 0 if lora else elements * compute + wide
    mlp = elements * residual + wide * (3 if shape.gated else 1) + kept_inputs
    keeps_context = not lora or attention == "sdpa"
    width = (2 if keeps_context else 1) + 1 + 2 * shape.kv_ratio
    attention_part = elements * residual + elements * compute * width
    return LayerBytes(
        mlp=mlp + mask + statistics,
        attention=attention_part + mask + statistics,
        core=_core(shape, numerics, attention, cuda=cuda),
    )
