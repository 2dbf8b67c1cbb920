"""A step's memory as a few moments, each affine in the micro-batch.

The peak of a training step falls on one of a handful of moments: the end of forward, the loss's
backward, the head's, the last or first layer's, the embedding's, or the optimizer step. One list
answers for every micro-batch, one number at a time or for arrays. Terms are bytes on one device.
"""

from mpwatch.planner.activations import LayerBytes, layer_bytes, norm_statistics
from mpwatch.planner.footprint import (
    Moment,
    Setup,
    keeps_gradients,
    optimizer_moment,
    static_terms,
)
from mpwatch.planner.model import PlainModel, TrackedModel, TransformerShape, growth_key
from mpwatch.planner.numerics import shards

INDEX_BYTES = 8
"""int64 token ids and targets."""


class _Transformer:
    """The sizes that several moments share, worked out once for one setup."""

    def __init__(self, setup: Setup, shape: TransformerShape, *, accumulating: bool) -> None:
        self.setup, self.shape, self.accumulating = setup, shape, accumulating
        numerics = self.numerics = setup.numerics
        self.elements = shape.sequence * shape.hidden
        self.wide = shape.sequence * shape.intermediate * numerics.compute
        self.stream = self.elements * numerics.residual
        self.scores = shape.sequence * shape.vocabulary
        self.frozen = setup.lora_rank is not None
        self.layer: LayerBytes = layer_bytes(
            shape, numerics, setup.attention, cuda=setup.cuda, lora=self.frozen
        )
        statistics = norm_statistics(shape, numerics, cuda=setup.cuda)
        head_input = 0 if self.frozen else self.elements * numerics.compute
        self.tail = self.stream + head_input + statistics
        self.data = 2.0 * INDEX_BYTES * shape.sequence
        self.static = static_terms(setup, accumulating=accumulating)
        self.gathers = setup.sharding == "zero3"

    @property
    def kept(self) -> float:
        """Bytes per sample that all layers keep until backward reaches them."""
        kept = {
            "none": self.layer.total,
            "selective": self.layer.mlp + self.layer.attention,
            "full": float(self.stream),
        }[self.setup.checkpointing]
        return self.shape.layers * kept

    @property
    def recomputed(self) -> float:
        """Bytes per sample that reappear while one layer is being recomputed."""
        if self.setup.checkpointing == "none":
            return 0.0
        if self.setup.checkpointing == "selective":
            return self.layer.core
        return self.layer.total - self.stream

    def casts(self, *, forward: bool) -> float:
        """Autocast's 16-bit weights: all live to the end of forward (its cache), then those that
        autograd saved; a checkpointed layer brings only its own back."""
        if not self.numerics.casts or self.gathers:
            return 0.0
        whole = 2.0 * self.shape.matrices
        if forward or self.setup.checkpointing != "full":
            return whole
        return 2.0 * self.shape.head_parameters

    def gathered(self, layers: int) -> float:
        """ZeRO-3's working set: the root unit (embeddings, head) and `layers` layer units."""
        if not self.gathers:
            return 0.0
        root = self.shape.parameters - self.shape.layers * self.shape.layer_parameters
        units = max(0, root) + layers * self.shape.layer_parameters
        return float(units * self.numerics.compute)

    def new_gradient(self, parameters: float) -> float:
        """Bytes of a weight's gradient just computed: under autocast 16-bit and its fp32 copy."""
        if self.frozen:
            return 0.0
        width = self.numerics.compute if self.gathers else self.numerics.gradients
        return parameters * (width + (self.numerics.compute if self.casts(forward=True) else 0))

    def moment(
        self, name: str, activations: float, *, phase: str = "backward", logits: float = 0.0,
        casts: float = 0.0, gradients: float = 0.0, gathered: float = 0.0,
    ) -> Moment:  # fmt: skip
        """One moment from the terms that are its own."""
        fixed = {**self.static, "casts": casts, "gathered": gathered}
        fixed["gradients"] += gradients
        per_sample = {"activations": activations + self.data, "logits": logits}
        return Moment(phase=phase, name=name, fixed=fixed, per_sample=per_sample)

    def forward_end(self) -> Moment:
        """The loss has just been computed: logits (and their fp32 copy) and log-softmax."""
        half_logits = self.numerics.compute if self.numerics.compute < 4 else 0
        return self.moment(
            "loss",
            self.kept + self.tail,
            phase="forward",
            logits=self.scores * (8.0 + half_logits),
            casts=self.casts(forward=True),
            gathered=self.gathered(0),
        )

    def loss_backward(self) -> Moment:
        """log-softmax, its gradient and the logits' gradient: 12 bytes per token and word."""
        return self.moment(
            "loss backward",
            self.kept + self.tail,
            logits=12.0 * self.scores,
            casts=self.casts(forward=False),
            gathered=self.gathered(0),
        )

    def head_backward(self) -> Moment:
        """The head's weight gradient appears beside the logits' gradient."""
        first = 0 if self.frozen else self.shape.head_parameters * self.numerics.compute
        return self.moment(
            "head backward",
            self.kept + self.tail + self.elements * self.numerics.compute,
            logits=float(self.numerics.compute * self.scores),
            casts=self.casts(forward=False),
            gradients=first,
            gathered=self.gathered(0),
        )

    def head_gradient_cast(self) -> Moment:
        """Autocast's 16-bit gradient of the head beside its fp32 copy; logits are gone."""
        return self.moment(
            "head gradient cast",
            self.kept + self.stream + self.elements * self.numerics.compute,
            casts=self.casts(forward=False),
            gradients=self.new_gradient(self.shape.head_parameters),
            gathered=self.gathered(0),
        )

    def _head_gradient(self) -> float:
        """The head's gradient once it is there: part of the sum already when N > 1."""
        if self.frozen or (self.accumulating and not self.gathers):
            return 0.0
        width = self.numerics.compute if self.gathers else self.numerics.gradients
        return float(self.shape.head_parameters * width)

    def _layer_casts(self) -> float:
        casts = self.casts(forward=False)
        if casts and self.setup.checkpointing == "full":
            return 2.0 * self.shape.layer_matrices
        return casts

    def mlp_backward(self) -> Moment:
        """Backward enters the last layer: the wide part's gradient and that of its matrix."""
        block = self.shape.hidden * self.shape.intermediate
        return self.moment(
            "last layer backward",
            self.kept + self.recomputed + self.stream + self.wide,
            casts=self._layer_casts(),
            gradients=self._head_gradient() + self.new_gradient(block),
            gathered=self.gathered(2),
        )

    def first_layer_backward(self) -> Moment:
        """The same in the first layer: little is kept, but all other gradients are there."""
        shape = self.shape
        others = shape.parameters - shape.layer_parameters - shape.head_parameters
        block = shape.hidden * shape.intermediate
        width = self.numerics.gradients / shards(self.setup.sharding, self.setup.devices)[1]
        done = 0.0 if self.accumulating or self.frozen else max(0, others) * width
        return self.moment(
            "first layer backward",
            self.kept / shape.layers + self.recomputed + self.stream + self.wide,
            casts=self._layer_casts() / (1 if self.setup.checkpointing == "full" else shape.layers),
            gradients=done + self.new_gradient(block),
            gathered=self.gathered(1),
        )

    def attention_backward(self) -> Moment:
        """Backward is inside the last layer's attention: two s x s gradients per head."""
        width = 4 if self.numerics.casts and self.setup.cuda else self.numerics.compute
        squares = 0.0
        if self.setup.attention == "math":
            squares = 2.0 * width * self.shape.heads * self.shape.sequence**2
        mlp = 0 if self.accumulating else self.shape.layer_parameters * 2 // 3
        return self.moment(
            "last attention backward",
            self.kept + self.recomputed - self.layer.mlp + 2 * self.stream + squares,
            casts=self._layer_casts(),
            gradients=self._head_gradient() + self.new_gradient(mlp),
            gathered=self.gathered(2),
        )

    def embedding_backward(self) -> Moment:
        """The end of backward: all gradients, and the embedding's new one when it is a sum."""
        shape, numerics = self.shape, self.numerics
        fixed = static_terms(self.setup, accumulating=True)
        summed = self.accumulating or shape.tied
        new = 0.0 if self.frozen or not summed else self.new_gradient(shape.head_parameters)
        fixed |= {"gathered": self.gathered(0)}
        fixed["gradients"] += new if not numerics.casts else new * 4 / 6
        return Moment(
            phase="backward",
            name="embedding backward",
            fixed=fixed,
            per_sample={"activations": self.data + self.stream},
        )


def _tracked_moments(
    setup: Setup, model: TrackedModel, *, accumulating: bool
) -> tuple[Moment, ...]:
    """Moments of a module that was run on fake tensors."""
    key = growth_key(setup.numerics.name, setup.checkpointing, accumulating=accumulating)
    static = static_terms(setup, accumulating=accumulating)
    if setup.sharding == "zero3":
        # What is gathered: everything outside the blocks, and the block in use with the next one.
        units = model.root_parameters + 2 * model.block_parameters
        static["gathered"] = float(units * setup.numerics.compute)
    found = [
        Moment(
            phase=growth.phase,
            name=growth.phase,
            fixed={k: static.get(k, 0.0) + growth.fixed.get(k, 0.0) for k in static | growth.fixed},
            per_sample=growth.per_sample,
        )
        for growth in model.growth[key]
    ]
    return (*found, optimizer_moment(setup, data=0.0))


def moments(setup: Setup, *, accumulating: bool) -> tuple[Moment, ...]:
    """The moments of one micro-batch and the step; `accumulating` is N > 1.

    A model known by its size alone has only its static terms: activations are unknown.
    """
    accumulating = accumulating or keeps_gradients(setup)
    if isinstance(setup.model, PlainModel):
        end = Moment(
            phase="backward",
            name="gradients whole",
            fixed=static_terms(setup, accumulating=True),
            per_sample={},
        )
        return (end, optimizer_moment(setup, data=0.0))
    if isinstance(setup.model, TrackedModel):
        return _tracked_moments(setup, setup.model, accumulating=accumulating)
    sizes = _Transformer(setup, setup.model, accumulating=accumulating)
    return (
        sizes.forward_end(),
        sizes.loss_backward(),
        sizes.head_backward(),
        sizes.head_gradient_cast(),
        sizes.mlp_backward(),
        sizes.attention_backward(),
        sizes.first_layer_backward(),
        sizes.embedding_backward(),
        optimizer_moment(setup, data=sizes.data),
    )
