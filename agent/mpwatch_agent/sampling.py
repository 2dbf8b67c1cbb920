"""What is measured only now and then, and how often: gradient norms and memory.

Owns the cadences (`set_sampling` changes them) and keeps their cost apart from the rest, so that
the agent can say what each of them costs.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.events import PhaseMemory
from mpwatch.vocabulary import (
    ACTIVATIONS_EVERY,
    GRAD_NORM_EVERY,
    GRADIENTS_EVERY,
    MEMORY_EVERY,
)
from mpwatch_agent.device import Later, Reading, settle
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.gradients import gradients_of, norm_of
from mpwatch_agent.memory import DEAR_READING_S, MemoryEdges, memory_source
from mpwatch_agent.shield import Gate
from mpwatch_agent.tracks import OptimizerTrack

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop

# A clip's norm counts as the gradient norm when it is this close to one computed here.
CLIP_AGREES = 0.01


class Sampling:
    """Cadences in steps; 0 is off. `gate` gets the time that sampled work took."""

    def __init__(
        self, gate: Gate, grad_norm_every: int | None = None, memory_every: int | None = None
    ) -> None:
        self.grad_norm_every = GRAD_NORM_EVERY if grad_norm_every is None else grad_norm_every
        self.memory_every = MEMORY_EVERY if memory_every is None else memory_every
        self.gradients_every = GRADIENTS_EVERY
        self.gradients_exact = False
        self.activations_every = ACTIVATIONS_EVERY
        self._gate = gate
        self._norms: dict[int, tuple[Reading, bool]] = {}
        self.clips: list[tuple[Reading, bool]] = []
        self.clip_is_whole: bool | None = None
        self._edges: MemoryEdges | None = None
        # Told what `Locator` has methods of the same names for; guarded by the agent.
        self.whole: Callable[[OptimizerTrack, Any, Reading], None] | None = None
        self.clipped: Callable[[Reading], None] | None = None
        self.arm: Callable[[int, int], None] | None = None
        self.concluded: Callable[[OptimizerTrack, StepDraft], None] | None = None
        self.clip_seen: Callable[[], None] | None = None

    def set(self, asked: dict[str, int | bool]) -> str:
        """Change cadences by name, as `set_sampling` asks; what they are now, in words."""
        for name, value in asked.items():
            setattr(self, name, value)
        shown = ("grad_norm_every", "memory_every", *asked)
        return " ".join(f"{name}={getattr(self, name)}" for name in dict.fromkeys(shown))

    def watch_everything(self, steps: int, step: int) -> str:
        """Watch every gradient after every backward for `steps` steps from `step` on."""
        if self.arm is None:
            raise ValueError("overflows are not located (--locate off)")
        self.arm(step, steps)
        return f"every gradient is watched up to step {step + steps}"

    @contextlib.contextmanager
    def own_time(self) -> Iterator[None]:
        """What happens within is done on sampled steps only, and is booked as such."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._gate.sampled_s += time.perf_counter() - start

    # --- gradient norm ----------------------------------------------------------------------

    def before_update(self, loop: "Loop", track: OptimizerTrack, optimizer: Any) -> None:
        """Gradients of `track` are whole: take their norm if this step is sampled."""
        self._take_norm(loop, track, optimizer)
        if self.whole is not None:
            self.whole(track, optimizer, self._norms.get(track.serial, (None, False))[0])

    def _take_norm(self, loop: "Loop", track: OptimizerTrack, optimizer: Any) -> None:
        if not self.grad_norm_every or track.steps % self.grad_norm_every:
            return
        start = time.perf_counter()
        norm = norm_of(gradients_of(optimizer))
        if norm is not None:
            scaled = carries_scale(loop, optimizer)
            self._norms[track.serial] = (loop.reader.read(norm), scaled)
        self._gate.sampled_s += time.perf_counter() - start

    def clip_begins(self, loop: "Loop") -> None:
        """Before a clip changes gradients."""
        loop.settle()
        if self.clip_seen is not None:
            self.clip_seen()
        for track in loop.tracks.live:
            if track.has_open and not track.whole:
                optimizer = track.ref()
                if optimizer is not None:
                    loop.before_update(track, optimizer)

    def clip_ends(self, loop: "Loop", norm: Any, norm_type: Any) -> None:
        """A clip returned the norm it found, at no cost to us."""
        # One is enough to report, two to know that neither is the whole norm.
        if norm_type == 2 and len(self.clips) < 2:
            self.clips.append((loop.reader.keep(norm), loop.still_scaled))
            if self.clipped is not None:
                self.clipped(self.clips[-1][0])

    def after_update(self, loop: "Loop", track: OptimizerTrack, draft: StepDraft) -> None:
        """The window is over: give its draft the best norm there is."""
        own = self._norms.pop(track.serial, None) if self._norms else None
        clips = self.clips
        clip = clips[0] if len(clips) == 1 else None
        if clips:
            self.clips = []
        if own is not None and clip is not None and len(loop.tracks.live) == 1:
            self._compare(own, clip, loop.scale_reading())
        if self.concluded is not None:
            self.concluded(track, draft)
        best = own if own is not None else (clip if self.clip_is_whole else None)
        if best is not None:
            draft.grad_norm, draft.norm_is_scaled = best

    def _compare(
        self, own: tuple[Reading, bool], clip: tuple[Reading, bool], scale: Reading
    ) -> None:
        """A clip over some parameters only is not the gradient norm: find out on sampled steps."""
        mine, theirs = (_unscaled(*norm, scale) for norm in (own, clip))
        if mine is None or theirs is None or not math.isfinite(mine):
            return
        self.clip_is_whole = abs(mine - theirs) <= CLIP_AGREES * mine

    # --- memory -----------------------------------------------------------------------------

    def step_over(self, loop: "Loop", draft: StepDraft) -> None:
        """The leader's step is finished: hand over its memory and the agent's own time."""
        edges, loop.phases.edges = loop.phases.edges, None
        if edges is not None:
            draft.memory = {
                phase: PhaseMemory(start_bytes=s, end_bytes=e, peak_bytes=p, kind=edges.kind)
                for phase, (s, e, p) in edges.take().items()
            }
            if edges.slowest_s > DEAR_READING_S:
                # Something makes readings dear here: take them more rarely, never for free.
                self.memory_every *= 2
                edges.slowest_s = 0.0
        if self.memory_every and draft.step % self.memory_every == 0:
            self.sample_memory(loop)
        draft.agent_s, self._gate.own_s = self._gate.own_s, 0.0
        draft.sampled_s, self._gate.sampled_s = self._gate.sampled_s, 0.0

    def sample_memory(self, loop: "Loop") -> None:
        """Read memory at the edges of the phases of the step that begins now."""
        if self._edges is None:
            source = memory_source(loop.device)
            if source is None:
                self.memory_every = 0
                return
            self._edges = MemoryEdges(source)
        loop.phases.edges = self._edges

    def not_ours(self, seconds: float) -> None:
        """Time that passed within a hook but is not the agent's work (a pause)."""
        self._gate.own_s -= seconds


def _unscaled(norm: Reading, scaled: bool, scale: Reading) -> float | None:
    value = None if isinstance(norm, Later) else settle(norm)
    if value is None or not scaled:
        return value
    return value / scale if isinstance(scale, float) and scale else None


def carries_scale(loop: "Loop", optimizer: Any) -> bool:
    """Whether the gradients of `optimizer` carry the loss scale now."""
    if len(loop.tracks.live) == 1 or not loop.scaled or loop.scaler is None:
        return loop.still_scaled
    # With several optimizers one unscale clears the flag of all: ask the scaler.
    state = loop.scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is torch.amp.grad_scaler.OptState.READY
