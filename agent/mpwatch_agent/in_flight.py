"""The gradients of a loop whose backward we scale, from the seed to the decision.

One invariant: between a scaled backward and the first of clip and step, every gradient of every
live optimizer carries the same scale; then none does. The decision (step or skip, next scale) is
taken once for all optimizers that shared the backwards.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpwatch_agent.gradient_scaling import Seeds, gradients_of, largest, multiply, unscale
from mpwatch_agent.loop import Loop
from mpwatch_agent.scaling import LossScaler, Update
from mpwatch_agent.steering import Arguments
from mpwatch_agent.tracks import OptimizerTrack, Probe


class GradientsInFlight:
    """Scales, unscales and decides. `decided(update)` is told of each decision."""

    def __init__(
        self,
        loop: Loop,
        skipping: set[int],
        scaler: LossScaler,
        decided: Callable[[Update], None],
    ) -> None:
        self.scaler = scaler
        self._loop = loop
        self._skipping = skipping
        self._told = decided
        self._seeds = Seeds()
        # The scale that all gradients carry now; None: they carry none.
        self.carried: float | None = None
        # Serials of optimizers that the last decision spoke for and that have not come yet.
        self._spoken_for: set[int] = set()
        self._probes: list[tuple[OptimizerTrack, list[Probe]]] = []

    def backward_begins(self, arguments: Arguments) -> Arguments:
        """What the backward is to get instead of `arguments`."""
        scale = self.scaler.scale
        if self.carried != scale:
            left = gradients_of(self._live())
            if left:
                # Kept from before (a step that never cleared, say): they must not be mixed.
                with torch.no_grad():
                    multiply(left, scale / (self.carried or 1.0))
            self.carried = scale
        self._spoken_for.clear()
        self._skipping.clear()
        return self._seeds.seeded(arguments, scale)

    def backward_ended(self) -> None:
        """Remember what the gradients were, to see whether the script changes them scaled."""
        self._probes = [(track, track.probe()) for track in self._loop.tracks.live]

    def edited(self) -> bool:
        """Whether the script changed gradients since the backward, while they were scaled."""
        for track, before in self._probes:
            now = track.probe()
            if any(
                a is not None and b is not None and a != b for a, b in zip(now, before, strict=True)
            ):
                return True
        return False

    def speaks_for(self, optimizer: Any) -> bool:
        """Whether a scaled backward came before this step of `optimizer`."""
        serial = self._loop.tracks.of(optimizer).serial
        if self.carried is not None:
            return True
        known = serial in self._spoken_for
        self._spoken_for.discard(serial)
        return known

    def decide(self, optimizer: Any) -> None:
        """Gradients are whole: unscale them all; skip the steps, and lower the scale, or not."""
        if self.carried is None:
            return
        loop, before = self._loop, self.carried
        mine = loop.tracks.of(optimizer)
        open_tracks = [t for t in loop.tracks.live if t.window or t is mine]
        stepping = [o for o in (track.ref() for track in open_tracks) if o is not None]
        gradients = gradients_of(stepping)
        counted = {id(gradient) for gradient in gradients}
        others = [g for g in gradients_of(self._live()) if id(g) not in counted]
        with torch.no_grad():
            overflowed = unscale(gradients, before)
            unscale(others, before)
            peak = largest(gradients) if self.scaler.guide and not overflowed else None
        self.carried = None
        self._spoken_for = {t.serial for t in loop.tracks.live if t is not mine}
        self._skipping.update(id(o) for o in stepping if overflowed)
        samples = [micro.samples for micro in mine.window]
        update = self.scaler.update(
            overflowed,
            micro_batches=max(1, len(mine.window)),
            samples=None if None in samples else sum(s or 0 for s in samples),
            peak=peak,
        )
        loop.steered_scale = (before, update.after)
        self._told(update)

    def land(self, *, skip: bool) -> None:
        """Nobody decides any more: gradients carry no scale, bad ones are not stepped on."""
        scale, self.carried = self.carried, None
        if scale is None:
            return
        live = self._live()
        for optimizer in live:
            # Until it is known to be good.
            self._skipping.add(id(optimizer))
        with torch.no_grad():
            overflowed = unscale(gradients_of(live), scale)
        if not overflowed and not skip:
            self._skipping.difference_update(id(optimizer) for optimizer in live)

    def land_one(self, optimizer: Any) -> None:
        """`optimizer` steps inside the backward: its gradients as they should be."""
        if self.carried is not None:
            with torch.no_grad():
                if unscale(gradients_of([optimizer]), self.carried):
                    self._skipping.add(id(optimizer))

    def _live(self) -> list[Any]:
        optimizers = (track.ref() for track in self._loop.tracks.live)
        return [optimizer for optimizer in optimizers if optimizer is not None]
