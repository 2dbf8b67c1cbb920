"""What decides a step's memory, and the terms that all moments share.

A `Moment` is a point of a step where memory may peak: a sum of terms `fixed + per_sample * b`. Here
are the static terms, the optimizer's moment, and what is read off a list of moments: peak, phases,
and the term that binds. Pure.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from mpwatch.planner.model import Model, PlainModel, TrackedModel
from mpwatch.planner.numerics import (
    Numerics,
    Optimizer,
    lora_parameters,
    shards,
    static_bytes,
)

STATIC_TERMS = ("weights", "master", "gradients", "states", "casts", "gathered")
BINDING_NAMES = ("static", "activations", "logits", "optimizer transient")
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
    """Terms that are there through forward: weights, states, and gradients where they stay."""
    trained = trained_parameters(setup)
    terms = static_bytes(trained, setup.numerics, setup.optimizer, setup.sharding, setup.devices)
    frozen = (setup.model.parameters - trained) * setup.numerics.weights
    terms["weights"] += max(0, frozen) / shards(setup.sharding, setup.devices)[0]
    if isinstance(setup.model, TrackedModel):
        terms["weights"] += setup.model.buffer_bytes
    if not (accumulating or keeps_gradients(setup)):
        terms["gradients"] = 0.0
    return terms


def keeps_gradients(setup: Setup) -> bool:
    """Whether gradients stay through forward even when N = 1: DDP's buckets are made once, and
    gradients are views of them. A sharded module that was tracked whole is counted so as well."""
    sharded_module = isinstance(setup.model, TrackedModel) and setup.sharding != "none"
    return setup.sharding in ("ddp", "zero1") or sharded_module


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
