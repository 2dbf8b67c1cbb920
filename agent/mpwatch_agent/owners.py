"""Which optimizer owns what: parameters, gradients, a model's weights. Asks only who lives."""

from typing import Any

from mpwatch_agent.stash import parameters_of
from mpwatch_agent.tracks import OptimizerTrack, Tracks


class Owners:
    """Look-ups over the live optimizers of a loop."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._leaves: tuple[Any, set[int]] = (None, set())

    def _live(self) -> list[tuple[OptimizerTrack, Any]]:
        pairs = [(track, track.ref()) for track in self._tracks.live]
        return [(track, optimizer) for track, optimizer in pairs if optimizer is not None]

    def leaves(self) -> set[int]:
        """Identities of all parameters that an optimizer owns."""
        live = self._live()
        key = [(t.serial, len(group["params"])) for t, o in live for group in o.param_groups]
        if key != self._leaves[0]:
            self._leaves = (key, {id(p) for _, o in live for p in parameters_of(o)})
        return self._leaves[1]

    def of_gradients(self, gradients: list[Any]) -> list[Any]:
        """The optimizers that own any of `gradients`."""
        if len(self._tracks.live) == 1 and gradients:
            # The common case: whoever has the first one.
            optimizer, first = self._tracks.live[0].ref(), gradients[0]
            groups = () if optimizer is None else optimizer.param_groups
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is first:
                        return [optimizer]
        identities = {id(gradient) for gradient in gradients}
        return [
            optimizer
            for _, optimizer in self._live()
            if any(id(p.grad) in identities for p in parameters_of(optimizer))
        ]

    def of_model(self, model: Any) -> OptimizerTrack | None:
        """The first optimizer that owns any of the weights of `model`."""
        mine = {id(parameter) for parameter in model.parameters()}
        for track, optimizer in self._live():
            if any(id(p) in mine for p in parameters_of(optimizer)):
                return track
        return None
