"""Clips under accumulation: once per real window over the whole sum, only a norm in the others.

Called by the hooks on torch's own clipping; who owns what and which windows are over,
`Accumulation` knows.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpwatch_agent.loop import Loop
from mpwatch_agent.stash import parameters_of

if TYPE_CHECKING:
    from mpwatch_agent.accumulation import Accumulation


class Clip(NamedTuple):
    """How a clip is to be done: over `tensors`; swallowed, its norm is multiplied by `factor`."""

    tensors: Any
    factor: Any = None


class Clips:
    """Decides about each clip of gradients."""

    def __init__(self, part: "Accumulation", loop: Loop) -> None:
        self._part = part
        self._loop = loop
        # The last factor of a norm, what it is made of, and the scale, so that nothing else can
        # come to be where it is.
        self._known: tuple[int, int, int] | None = None
        self._quotient: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None

    def over(self, tensors: Any) -> Clip:
        """Over which gradients a norm is taken, and whether it is all that is wanted."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = self._part.owners.of_gradients(tensors)
        swallowed = [self._part.swallows(owner) for owner in owners]
        if not any(swallowed):
            for owner in owners:
                tensors = self._whole(owner) or tensors
            return Clip(tensors)
        if not all(swallowed):
            self._part.refuse("one clip covers optimizers whose windows do not end together")
            return Clip(tensors)
        window = self._part.window_of(owners[0])
        scaler = self._loop.scaler
        if window is not None and window.unscaled and getattr(scaler, "_scale", None) is not None:
            # The script has unscaled, as far as it knows; never `get_scale`, which waits.
            return Clip(tensors, self._factor(scaler._scale))
        return Clip(tensors, self._part.k)

    def _factor(self, scale: torch.Tensor) -> torch.Tensor:
        """K over the loss scale, divided anew when either has changed."""
        key = (self._part.k, id(scale), scale._version)
        if key != self._known:
            self._known, self._quotient, self._scale = key, self._part.k / scale, scale
        assert self._quotient is not None
        return self._quotient

    def _whole(self, owner: Any) -> list[Any] | None:
        """Make the gradients whole; all of them, where some of them came only now."""
        before = [p.grad for p in parameters_of(owner)]
        self._part.gradients_whole(owner)
        after = [p.grad for p in parameters_of(owner)]
        if all(a is b for a, b in zip(before, after, strict=True)):
            return None
        return [gradient for gradient in after if gradient is not None]

    def swallowed(self, parameters: Any) -> bool:
        """Whether gradients of `parameters` are not to be changed by a clip."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        owners = self._part.owners.of_gradients(gradients)
        for owner in owners:
            if not self._part.swallows(owner):
                return False
        return bool(owners)
