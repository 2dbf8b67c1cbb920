"""Tracks a step's phases: whose bytes are alive when each peaks, on fake tensors or real ones.

Two windows are run, the second counts: optimizer states exist then. Nothing is allocated in fake
mode. Called by `track_child`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import Struct, structs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpwatch_agent.scratch import convolution_scratch
from mpwatch_agent.track_step import Step
from mpwatch_agent.track_subject import (
    Configuration,
    SharedFakeMode,
    Subject,
    conversions_allowed,
    fake_leftovers,
    repeated_blocks,
)
from mpwatch_agent.tracker import (
    ACTIVATIONS,
    DATA,
    GRADIENTS,
    LOGITS,
    MASTER,
    STATES,
    TRANSIENT,
    WEIGHTS,
    ByteTracker,
    tensors_in,
)

OWNERS = {
    DATA: DATA,
    "forward": ACTIVATIONS,
    "loss": LOGITS,
    "backward": LOGITS,
    "optimizer": TRANSIENT,
}
"""Who owns what is born in a phase; in backward until the output's gradient is known."""


class PhaseBytes(Struct, frozen=True, kw_only=True):
    """The peak of one phase, by owner."""

    phase: str
    peak_bytes: int
    owners: dict[str, int]


class Tracked(Struct, frozen=True, kw_only=True):
    """What one configuration needs."""

    configuration: Configuration
    peak_bytes: int
    phases: tuple[PhaseBytes, ...]
    parameters: int
    trained: int
    buffer_bytes: int
    largest: int
    """elements of the largest trained tensor"""
    block_parameters: int = 0
    """of the largest repeated block; 0 without blocks"""
    root_parameters: int = 0
    """outside the repeated blocks"""


class _Books:
    """Switches the tracker's owner with the phases, and keeps each phase's peak."""

    def __init__(self, tracker: ByteTracker, step: Step) -> None:
        self.tracker, self.step = tracker, step
        self.peaks: dict[str, PhaseBytes] = {}
        self._phase: str | None = None

    def __call__(self, phase: str) -> None:
        """A phase begins. The loss belongs to forward; in backward what is born before the
        output's gradient is known still belongs to the logits."""
        self.close()
        self._phase = "forward" if phase in (DATA, "loss") else phase
        self.tracker.owner = OWNERS[phase]
        if phase == "forward":
            self.tracker.reset_peak()

    def close(self) -> None:
        """The phase that ran so far has ended: keep its peak if it is the largest."""
        tracker = self.tracker
        if self._phase == "optimizer":
            self._claim_states()
        found = PhaseBytes(
            phase=self._phase or "", peak_bytes=tracker.peak_bytes, owners=tracker.peak_owners
        )
        known = self.peaks.get(found.phase)
        if self._phase is not None and (known is None or found.peak_bytes > known.peak_bytes):
            self.peaks[found.phase] = found
        tracker.reset_peak()

    def _claim_states(self) -> None:
        states = self.step.optimizer.state.values()
        self.tracker.claim((t for state in states for t in tensors_in(state)), STATES)

    def hook_gradients(self) -> None:
        """Gradients are relabelled as soon as they are accumulated."""

        def accumulated(parameter: torch.Tensor) -> None:
            self.tracker.claim([parameter.grad], GRADIENTS)

        for parameter in self.step.trained:
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _after_loss(step: Step, tracker: ByteTracker) -> Iterator[None]:
    """In backward, owner turns from logits to activations when the output's gradient is there."""

    def turn(_: torch.Tensor) -> None:
        tracker.owner = ACTIVATIONS

    def output_known(_: nn.Module, __: Any, output: Any) -> None:
        tracker.claim(tensors_in(output), LOGITS)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(turn)  # type: ignore[no-untyped-call]

    handle = step.module.register_forward_hook(output_known)
    try:
        yield
    finally:
        handle.remove()


def track(
    subject: Subject, configuration: Configuration, *, fake: bool = True, cpu: bool = False
) -> Tracked:
    """Run two windows and report the second's peaks; `fake=False` uses real tensors.

    With `cpu` the scratch of torch's CPU convolutions is added, else the training is meant for
    CUDA, whose workspaces are covered by the planner's margin.

    More than two micro-batches need what two need, so no more are run.
    """
    original = subject
    repeated = min(configuration.accumulation_steps, 2)
    short = structs.replace(configuration, accumulation_steps=repeated)
    mode = SharedFakeMode() if fake else None
    if mode is not None:
        subject = structs.replace(subject, factory=lambda: _faked(original.factory, mode))
    with mode or contextlib.nullcontext():
        step = Step(subject, short)
        tracker = ByteTracker(convolution_scratch if cpu else None)
        tracker.claim([*step.module.parameters(), *step.module.buffers()], WEIGHTS)
        tracker.claim(step.masters, MASTER)
        books = _Books(tracker, step)
        books.hook_gradients()
        with _after_loss(step, tracker), tracker:
            if step.has_states or repeated == 1:
                step.warm_up(books)
                books.close()
                books.peaks.clear()
            step.window(books)
            books.close()
    return _answer(step, configuration, books)


def _faked(factory: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    with conversions_allowed():
        module = factory()
    if isinstance(module, nn.Module):
        fake_leftovers(module, mode)
    return module


def _answer(step: Step, configuration: Configuration, books: _Books) -> Tracked:
    phases = tuple(books.peaks[name] for name in ("forward", "backward", "optimizer"))
    whole = sum(p.numel() for p in step.module.parameters())
    blocks = [sum(p.numel() for p in b.parameters()) for b in repeated_blocks(step.module)]
    return Tracked(
        configuration=configuration,
        peak_bytes=max(phase.peak_bytes for phase in phases),
        phases=phases,
        parameters=whole,
        trained=sum(p.numel() for p in step.trained),
        buffer_bytes=sum(b.untyped_storage().nbytes() for b in step.module.buffers()),
        largest=max((p.numel() for p in step.trained), default=0),
        block_parameters=max(blocks, default=0),
        root_parameters=max(0, whole - sum(blocks)),
    )
