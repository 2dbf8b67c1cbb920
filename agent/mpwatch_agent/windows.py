"""Micro-batches and windows: which backward belongs to which optimizer's next step.

One optimizer is the common case and costs nothing beyond a list; with several, probes of their
gradients tell which of them a backward reached. No clock, no event: counting only.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpwatch_agent.tracks import MicroBatch, OptimizerTrack, Probe, Tracks

# What token ids come in; a matrix of them is a batch of sequences.
TOKENS = frozenset({torch.int64, torch.int32})
Before = list[tuple[OptimizerTrack, list[Probe]]]


class Windows:
    """The open micro-batch and the open window of every optimizer.

    `discarded(track, micro_batches)` is told of gradients that were cleared without a step.
    """

    def __init__(self, discarded: Callable[[OptimizerTrack, int], None]) -> None:
        self.tracks = Tracks()
        self.micro: MicroBatch | None = None
        self.in_backward = False
        # Backwards since the last step of any optimizer: above 0 is inside a window.
        self.unstepped = 0
        self.roots_seen = False
        # Optimizer steps that are running: a closure's backward runs inside one.
        self.stepping = 0
        # Steps may be swallowed: windows stay open across them.
        self.banks = False
        # `zero_grad` is how this script clears: no need to look for gradients set to None.
        self.clears_by_hook = False
        # Told of each micro-batch whose backward has added to gradients.
        self.backward_ended: Callable[[MicroBatch], None] | None = None
        self._discarded = discarded
        self._before: Before = []

    # --- micro-batches ------------------------------------------------------------------------

    def forward_was_not_training(self) -> bool:
        """The loader was asked for more before any backward: that forward was no micro-batch."""
        if self.micro is None or self.micro.backwards:
            return False
        self.micro = None
        return True

    def backward_begins(self) -> MicroBatch:
        """An outermost backward starts: the micro-batch it belongs to."""
        self.in_backward = True
        micro = self.micro
        if micro is None or (micro.backwards and not self.roots_seen):
            micro = self.micro = MicroBatch()
        if micro.losses and not micro.backwards:
            # Of a backward that raised: this one is called in its place.
            micro.losses.clear()
        if not self.clears_by_hook or len(self.tracks.live) > 1:
            self._look_before()
        return micro

    def _look_before(self) -> None:
        """What cannot be known from calls alone: gradients set to None, and whose they will be."""
        tracks = self.tracks.live
        if not self.clears_by_hook:
            for track in tracks:
                if track.has_open and track.is_cleared():
                    self.discard(track)
        if len(tracks) > 1:
            self._before = [(track, track.probe()) for track in tracks]

    def backward_ends(self, completed: bool) -> None:
        """The outermost backward returned, or raised: then nothing is counted."""
        self.in_backward = False
        micro = self.micro
        if micro is None or not completed:
            self._before = []
            return
        micro.backwards += 1
        if micro.consumed:
            # Steps inside the backward have used it up already.
            self.micro = None
            return
        self.unstepped += 1
        if self._before:
            for track, probes in self._before:
                if _changed(probes, track.probe()):
                    track.add(micro)
            self._before = []
        else:
            for track in self.tracks.live:
                if track.last_micro is not micro:
                    track.window.append(micro)
                    track.last_micro = micro
                    track.whole = False
        if self.backward_ended is not None:
            self.backward_ended(micro)

    def micro_index(self) -> int:
        """Position of the open micro-batch in the leader's window, from 0."""
        track = self.tracks.leader or next(iter(self.tracks.live), None)
        if track is None:
            return 0
        # Before its backward ended, the open one is not in the window yet.
        return len(track.window) - (bool(track.window) and track.window[-1] is self.micro)

    # --- windows ------------------------------------------------------------------------------

    def take(self, track: OptimizerTrack) -> list[MicroBatch]:
        """End the window of `track` at a step."""
        self._count_backwardless(track)
        window = track.take_window()
        self.unstepped = self._banked() if self.banks else 0
        if not self.in_backward:
            self.micro = None
        return window

    def bank(self, track: OptimizerTrack) -> None:
        """End a script window of `track` whose step is swallowed: its window stays open."""
        self._count_backwardless(track)
        track.bank()
        # Inside a window until its real step, whatever the script clears meanwhile.
        self.unstepped = max(self._banked(), track.script_windows)
        self.micro = None

    def kept_back(self) -> int:
        """Script windows whose step was swallowed and whose real step has not come (yet)."""
        return self._banked()

    def _banked(self) -> int:
        most = 0
        for track in self.tracks.live:
            most = max(most, track.script_windows)
        return most

    def _count_backwardless(self, track: OptimizerTrack) -> None:
        micro = self.micro
        if not track.has_open and micro is not None and not micro.consumed:
            # A forward, no backward of ours (autograd.grad), and a step all the same.
            track.window.append(micro)

    def optimizer_cleared(self, optimizer: Any) -> None:
        """`zero_grad` of an optimizer returned."""
        self.clears_by_hook = True
        track = self.tracks.of(optimizer)
        if track.has_open and not track.depth:
            self.discard(track)

    def probes(self) -> Before:
        """The probes of all optimizers that have an open window."""
        return [(track, track.probe()) for track in self.tracks.live if track.has_open]

    def module_cleared(self, before: Before) -> None:
        """`zero_grad` of a module returned; `before` is what `probes` was at its beginning."""
        self.clears_by_hook = True
        for track, probes in before:
            pairs = zip(track.probe(), probes, strict=True)
            changed = [now != then for now, then in pairs if then is not None]
            if track.has_open and not track.depth and changed and all(changed):
                self.discard(track)

    def discard(self, track: OptimizerTrack) -> None:
        """The gradients of `track` are gone without a step."""
        lost = track.discard_window()
        track.whole = False
        self.unstepped = self._banked() if self.banks else 0
        if self.micro is not None and self.micro.backwards:
            self.micro = None
        if lost:
            self._discarded(track, lost)


def _changed(before: list[Probe], after: list[Probe]) -> bool:
    return any(now is not None and now != then for now, then in zip(after, before, strict=True))


def sizes_of(arguments: Any) -> tuple[int | None, int | None]:
    """(samples, tokens) of a batch: from its first tensor that has a batch dimension."""
    found = arguments[0] if type(arguments) is tuple and arguments else arguments
    shape = found.shape if type(found) is torch.Tensor else None
    if not shape:
        found = _first_batch(arguments, 3)
        if found is None:
            return None, None
        shape = found.shape
    if len(shape) == 2 and found.dtype in TOKENS:
        return shape[0], shape[0] * shape[1]
    return shape[0], None


def _first_batch(value: Any, depth: int) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.dim() else None
    if not depth:
        return None
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for item in items:
            found = _first_batch(item, depth - 1)
            if found is not None:
                return found
    return None
