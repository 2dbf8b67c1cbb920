"""A step's memory as a few moments, each affine in the micro-batch.

The peak of a training step falls on one of a handful of moments: the end of forward, the loss's
backward, the head's, the last layer's, the embedding's, or the optimizer step. Each is a sum of
terms `fixed + per_sample * b`, so one list answers for every micro-batch, one number at a time or
for arrays of them. Terms are bytes on one device. Pure; tracked models give the same list.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from mpwatch.planner.activations import LayerBytes, layer_bytes, norm_statistics
from mpwatch.planner.model import (
    Model,
    PlainModel,
    TrackedModel,
    TransformerShape,
    growth_key,
)
from mpwatch.planner.numerics import (
    Numerics,
    Optimizer,
    lora_parameters,
    shards,
    static_bytes,
)

STATIC_TERMS = ("weights", "master", "gradients", "states", "casts", "gathered")
BINDING_NAMES = ("static", "activations", "logits", "optimizer transient")
INDEX_BYTES = 8
"""int64 token ids and targets."""

Terms = dict[str, float]


class Moment(Struct, frozen=True, kw_only=True):
    """One point of a step where memory may peak."""

    phase: str
    """forward, backward or optimizer"""
    name: str
    fixed: Terms
    per_sample: Terms

    @property
    def fixed_bytes(self) -> float:
        """Bytes that do not depend on the micro-batch."""
        return sum(self.fixed.values())

    @property
    def sample_bytes(self) -> float:
        """Bytes for each sample of the micro-batch."""
        return sum(self.per_sample.values())

    def bytes_at(self, micro_batch: float) -> float:
        """Total bytes at this micro-batch."""
        return self.fixed_bytes + self.sample_bytes * micro_batch

    def terms_at(self, micro_batch: float) -> Terms:
        """The same, term by term; the loss's terms stand under `logits`."""
        names = {**self.fixed, **self.per_sample}
        return {
            name: self.fixed.get(name, 0) + micro_batch * self.per_sample.get(name, 0)
            for name in names
        }


class Setup(Struct, frozen=True, kw_only=True):
    """Everything that decides the moments except micro-batch and N."""

    model: Model
    numerics: Numerics
    optimizer: Optimizer
    attention: str = "sdpa"
    checkpointing: str = "none"
    sharding: str = "none"
    devices: int = 1
    lora_rank: int | None = None
    cuda: bool = True
    """CUDA's rules for dropout masks and autocast; False is torch's CPU kernels."""


def trained_parameters(setup: Setup) -> int:
    """Parameters that have gradients and optimizer state."""
    model = setup.model
    if isinstance(model, TrackedModel):
        return model.trained
    if setup.lora_rank is None or isinstance(model, PlainModel):
        return model.parameters
    return lora_parameters(model.layers, model.hidden, setup.lora_rank)


def static_terms(setup: Setup, *, accumulating: bool) -> Terms:
    """Terms that are there through forward: weights, states, and gradients when N > 1."""
    trained = trained_parameters(setup)
    terms = static_bytes(trained, setup.numerics, setup.optimizer, setup.sharding, setup.devices)
    frozen = (setup.model.parameters - trained) * setup.numerics.weights
    terms["weights"] += max(0, frozen) / shards(setup.sharding, setup.devices)[0]
    if isinstance(setup.model, TrackedModel):
        terms["weights"] += setup.model.buffer_bytes
    if not accumulating:
        terms["gradients"] = 0.0
    return terms


def optimizer_moment(setup: Setup, *, data: float) -> Moment:
    """The step: gradients whole, activations gone, the optimizer's own temporaries.

    foreach makes one temporary as large as the parameters, a loop two of the largest tensor, a
    fused kernel none. O2 first copies its 16-bit gradients to fp32 for the masters.
    """
    numerics, optimizer = setup.numerics, setup.optimizer
    share = shards(setup.sharding, setup.devices)[2]
    trained = trained_parameters(setup)
    transient = 0.0
    if optimizer.scratch and optimizer.implementation == "foreach":
        transient = trained * numerics.states / share
    elif optimizer.scratch and optimizer.implementation == "loop":
        largest = 0 if isinstance(setup.model, PlainModel) else setup.model.largest
        transient = 2 * min(largest, trained) * numerics.states / share
    if numerics.master:
        transient += 4 * trained / share
    fixed = {**static_terms(setup, accumulating=True), "optimizer transient": transient}
    return Moment(phase="optimizer", name="step", fixed=fixed, per_sample={"activations": data})


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


def peak_moment(steps: Iterable[Moment], micro_batch: float) -> Moment:
    """The moment that holds the peak; the earlier one of equals."""
    return max(steps, key=lambda moment: moment.bytes_at(micro_batch))


def phase_peaks(steps: Sequence[Moment], micro_batch: float) -> dict[str, float]:
    """Peak bytes of each phase."""
    peaks: dict[str, float] = {}
    for moment in steps:
        value = moment.bytes_at(micro_batch)
        peaks[moment.phase] = max(value, peaks.get(moment.phase, 0.0))
    return peaks


def _grouped(terms: Terms) -> Terms:
    """Terms under the names of `BINDING_NAMES`."""
    groups = dict.fromkeys(BINDING_NAMES, 0.0)
    for name, value in terms.items():
        groups["static" if name in STATIC_TERMS else name] += value
    return groups


def binding_term(steps: Sequence[Moment], micro_batch: float) -> str:
    """The term whose removal would lower the peak most: what to work on first.

    Removing a term at one moment may leave another moment as the peak, so this is not simply the
    largest share.
    """
    grouped = [_grouped(moment.terms_at(micro_batch)) for moment in steps]

    def peak_without(name: str) -> float:
        return max(sum(groups.values()) - groups[name] for groups in grouped)

    return min(BINDING_NAMES, key=peak_without)
