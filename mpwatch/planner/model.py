"""What is trained: a transformer's shape, or just a number of parameters.

Shapes come from the command line or from `hf_config`. Sizes are checked on construction. Pure.
"""

from typing import Any

from msgspec import Struct, structs

from mpwatch.errors import UsageError

LARGEST_DIMENSION = 10**8
NAMES = {
    "layers": "--layers",
    "hidden": "--hidden",
    "heads": "--heads",
    "sequence": "--seq",
    "vocabulary": "--vocab",
    "intermediate": "MLP width",
    "kv_heads": "number of key/value heads",
}
"""Sizes of a shape as people give them."""


class TransformerShape(Struct, frozen=True, kw_only=True):
    """A decoder-only transformer as the memory and time formulas see it (symbols of the papers)."""

    layers: int
    """L"""
    hidden: int
    """h"""
    heads: int
    """a"""
    sequence: int
    """s, tokens per sample"""
    vocabulary: int
    """v"""
    intermediate: int
    """f, width of the MLP; 4h where nothing else is said"""
    kv_heads: int
    """key/value heads; equal to `heads` without grouped-query attention"""
    gated: bool = False
    """SwiGLU-type MLP with three matrices"""
    tied: bool = False
    """the output layer shares the embedding"""
    positions: bool = True
    """learned position embeddings (s x h)"""
    biases: bool = True
    """linear layers and norms carry biases"""
    parameters: int
    """P, trained parameters in all"""
    dropout: bool = False
    """dropout after attention softmax, projection and MLP"""

    def __post_init__(self) -> None:
        for name, said in NAMES.items():
            value = getattr(self, name)
            if not 1 <= value <= LARGEST_DIMENSION:
                raise UsageError(f"{said} {value} is out of range: 1 to {LARGEST_DIMENSION:.0e}")
        if self.hidden % self.heads:
            raise UsageError(f"hidden size {self.hidden} is no multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads are no multiple of {self.kv_heads} key/value heads"
            )

    @property
    def kv_ratio(self) -> float:
        """Width of keys (or values) over h."""
        return self.kv_heads / self.heads

    @property
    def layer_matrices(self) -> int:
        """Matrix parameters of one layer: 12h^2 for the classic block."""
        attention = self.hidden**2 * (2 + 2 * self.kv_ratio)
        return round(attention) + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: 12h^2 + 13h for the classic block with biases."""
        if not self.biases:
            return self.layer_matrices + 2 * self.hidden
        widths = self.hidden * (2 + 2 * self.kv_ratio) + self.hidden
        mlp = self.intermediate * (2 if self.gated else 1)
        return self.layer_matrices + round(widths) + mlp + 4 * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output matrix, v x h (bias-free), whether tied or not."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Weights that take part in matrix products: what autocast copies to 16 bits."""
        return self.layers * self.layer_matrices + self.head_parameters

    @property
    def largest(self) -> int:
        """Elements of the largest single tensor (bounds per-tensor temporaries)."""
        block = max(self.hidden * self.intermediate, self.hidden * self.hidden)
        return max(self.head_parameters, block)


class PlainModel(Struct, frozen=True, kw_only=True):
    """A model known only by its parameter count: static terms can be stated, activations not."""

    parameters: int


class Growth(Struct, frozen=True, kw_only=True):
    """What one phase of a tracked step adds above weights, states and carried-over gradients."""

    phase: str
    """forward or backward"""
    fixed: dict[str, float]
    per_sample: dict[str, float]
    """terms in bytes: activations, logits, casts, gradients"""


class TrackedModel(Struct, frozen=True, kw_only=True):
    """A module that was run on fake tensors: exact at the micro-batches run, affine between."""

    parameters: int
    trained: int
    """parameters that require gradients"""
    buffer_bytes: int
    largest: int
    """elements of the largest trained tensor"""
    growth: dict[str, tuple[Growth, ...]]
    """by `growth_key`"""
    block_parameters: int = 0
    """of the largest repeated block: a unit of FSDP; 0 without blocks"""
    root_parameters: int = 0
    """outside the repeated blocks"""
    flops_per_sample: float | None = None
    """forward and backward of one sample as counted by the run; None is unknown"""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that were tracked."""
        return tuple(dict.fromkeys(key.split("|")[0] for key in self.growth))

    @property
    def checkpointings(self) -> tuple[str, ...]:
        """Kinds of checkpointing that were tracked."""
        return tuple(dict.fromkeys(key.split("|")[1] for key in self.growth))


def growth_key(precision: str, checkpointing: str, *, accumulating: bool) -> str:
    """Name of one tracked variant; `accumulating` is N > 1."""
    return f"{precision}|{checkpointing}|{'N' if accumulating else '1'}"


Model = TransformerShape | PlainModel | TrackedModel


def count_parameters(shape: TransformerShape) -> int:
    """Parameters of the shape: 12Lh^2(1 + 13/(12h) + (v+s)/(12Lh)) for the classic tied block."""
    norm = shape.hidden * (2 if shape.biases else 1)
    embeddings = shape.head_parameters * (1 if shape.tied else 2)
    positions = shape.sequence * shape.hidden if shape.positions else 0
    return shape.layers * shape.layer_parameters + embeddings + positions + norm


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    parameters: int | None = None,
    intermediate: int | None = None,
    kv_heads: int | None = None,
    tied: bool | None = None,
    **flags: bool,
) -> TransformerShape:
    """A shape with the usual defaults filled in.

    Where `tied` is not said, it follows from the stated number of parameters (the nearer of the
    two counts), and is False when there is none.

    Raises:
        UsageError: a size is absurd, or the stated parameters contradict the shape (over 25 %).
    """
    common: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "vocabulary": vocabulary,
        "intermediate": intermediate or 4 * hidden,
        "kv_heads": kv_heads or heads,
        **flags,
    }
    choices = [tied] if tied is not None else [False, True]
    shapes = [TransformerShape(**common, tied=choice, parameters=0) for choice in choices]
    counts = [count_parameters(shape) for shape in shapes]
    if parameters is None:
        return structs.replace(shapes[0], parameters=counts[0])
    best = min(range(len(counts)), key=lambda index: abs(counts[index] - parameters))
    if abs(counts[best] - parameters) > 0.25 * parameters:
        raise UsageError(
            f"--params {parameters:.4g} contradicts the shape, which has {counts[best]:.4g}:"
            " correct one of them or leave --params out"
        )
    return structs.replace(shapes[best], parameters=parameters)
