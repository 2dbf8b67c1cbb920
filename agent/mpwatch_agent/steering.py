"""Where mpwatch changes a loop because it was asked to: one seam for all who do.

Observing never comes here: `gate.steers` is False and the hooks pass by. A part (virtual
accumulation, precision, a loss scaler) overrides the moments it needs; the parts are asked in
their order. A part that fails must leave the loop as it would be without it: `abandon`.
"""

from typing import Any

from mpwatch_agent.shield import Gate

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Part:
    """One thing that steers the loop. Each method is a moment of it, and does nothing here.

    Parts of lower `order` come first: gradients are gathered before anybody looks at the whole.
    """

    order = 0

    def backward_begins(self, arguments: Arguments) -> Arguments:
        """`torch.autograd.backward` was called from outside: the arguments it is to get."""
        return arguments

    def backward_ended(self, completed: bool) -> None:
        """That backward returned, or raised."""

    def gradients_whole(self, optimizer: Any) -> None:
        """The first of unscale, clip and step of a window that is not swallowed."""

    def swallows_unscale(self, scaler: Any, optimizer: Any) -> bool:
        """Whether `GradScaler.unscale_` is to do nothing."""
        return False

    def swallows_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        """Whether `GradScaler.step` is to do nothing."""
        return False

    def swallows_update(self, scaler: Any) -> bool:
        """Whether `GradScaler.update` is to do nothing."""
        return False

    def swallows_step(self, optimizer: Any, arguments: Arguments) -> bool:
        """Whether `Optimizer.step` is to do nothing (and return None)."""
        return False

    def step_called(self, optimizer: Any, arguments: Arguments) -> None:
        """An adopted optimizer's step, which nobody can swallow, is called like this."""

    def step_begins(self, optimizer: Any) -> None:
        """An `Optimizer.step` that is not swallowed begins."""

    def step_ended(self, optimizer: Any, completed: bool) -> None:
        """That step returned, or raised."""

    def cleared(self, optimizer: Any) -> None:
        """`Optimizer.zero_grad` returned."""

    def module_cleared(self, module: Any) -> None:
        """`Module.zero_grad` returned."""

    def swallows_clip(self, tensors: Any) -> Any:
        """What a clip of these gradients has to multiply the norm it returns with; None: clips."""
        return None

    def carried_scale(self) -> float | None:
        """The scale of ours that gradients carry before their window is whole; None: of none."""
        return None

    def swallows_values(self, gradients: list[Any]) -> bool:
        """Whether a clip of these gradients' values is to do nothing."""
        return False

    def forward_begins(self, arguments: Any) -> None:
        """A root's training forward begins; commands have acted."""

    def root_found(self, module: Any, within_call: bool) -> None:
        """A root module is known; `within_call`: its forward is about to run right now."""

    def roots_lost(self, reason: str) -> None:
        """No hook stays on plain modules, or none could be put on a root."""

    def scale_begins(self, scaler: Any) -> None:
        """`GradScaler.scale` of an enabled scaler was entered."""

    def scaler_loaded(self, scaler: Any) -> None:
        """`GradScaler.load_state_dict` of an enabled scaler returned."""

    def update_begins(self, scaler: Any, new_scale: Any) -> None:
        """`GradScaler.update` was entered and is not swallowed."""

    def update_ended(self, scaler: Any, new_scale: Any) -> None:
        """`GradScaler.update` returned: the scale is what the scaler itself made of it."""

    def loop_known(self) -> None:
        """Two steps are over, or the loop ended before: who has had no say by now has none."""

    def abandon(self, reason: str) -> None:
        """Something failed: from the next boundary on the loop is the script's own again."""


class Steering:
    """All parts, asked in their order; who swallows first decides."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.parts: list[Part] = []
        # Whether any part acts where a loss is scaled: once per micro-batch.
        self.scales = False
        # Optimizers, by identity, whose next step ends its window but is not to change weights.
        # Plain data: were it a question to a part that fails, a bad step would be taken.
        self.skipping: set[int] = set()

    def add(self, part: Part) -> None:
        """Have `part` asked as well, after those that are there."""
        self.parts.append(part)
        self.parts.sort(key=lambda each: each.order)
        self.scales = self.scales or type(part).scale_begins is not Part.scale_begins
        self._gate.steers = True

    def backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arguments = (args, kwargs)
        for part in self.parts:
            arguments = part.backward_begins(arguments)
        return arguments

    def backward_ended(self, completed: bool) -> None:
        for part in self.parts:
            part.backward_ended(completed)

    def gradients_whole(self, optimizer: Any) -> None:
        for part in self.parts:
            part.gradients_whole(optimizer)

    def swallows_unscale(self, scaler: Any, optimizer: Any) -> bool:
        swallowed = False
        for part in self.parts:
            swallowed = swallowed or part.swallows_unscale(scaler, optimizer)
        return swallowed

    def swallows_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        swallowed = False
        for part in self.parts:
            swallowed = swallowed or part.swallows_scaler_step(scaler, optimizer)
        return swallowed

    def swallows_update(self, scaler: Any) -> bool:
        swallowed = False
        for part in self.parts:
            swallowed = swallowed or part.swallows_update(scaler)
        return swallowed

    def swallows_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        swallowed = False
        for part in self.parts:
            swallowed = swallowed or part.swallows_step(optimizer, (args, kwargs))
        return swallowed

    def step_called(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for part in self.parts:
            part.step_called(optimizer, (args, kwargs))

    def step_begins(self, optimizer: Any) -> None:
        for part in self.parts:
            part.step_begins(optimizer)

    def step_ended(self, optimizer: Any, completed: bool) -> None:
        for part in reversed(self.parts):
            part.step_ended(optimizer, completed)

    def cleared(self, optimizer: Any) -> None:
        for part in self.parts:
            part.cleared(optimizer)

    def module_cleared(self, module: Any) -> None:
        for part in self.parts:
            part.module_cleared(module)

    def swallows_clip(self, tensors: Any) -> Any:
        clip = None
        for part in self.parts:
            clip = part.swallows_clip(tensors)
            if clip is not None:
                break
        if clip is None or clip.factor is None:
            return clip
        # The script knows nothing of a scale of ours.
        for part in self.parts:
            carried = part.carried_scale()
            if carried is not None:
                clip = clip._replace(factor=clip.factor / carried)
        return clip

    def swallows_values(self, gradients: list[Any]) -> bool:
        return any(part.swallows_values(gradients) for part in self.parts)

    def forward_begins(self, arguments: Any) -> None:
        for part in self.parts:
            part.forward_begins(arguments)

    def root_found(self, module: Any, within_call: bool) -> None:
        for part in self.parts:
            part.root_found(module, within_call)

    def roots_lost(self, reason: str) -> None:
        for part in self.parts:
            part.roots_lost(reason)

    def scale_begins(self, scaler: Any) -> None:
        for part in self.parts:
            part.scale_begins(scaler)

    def scaler_loaded(self, scaler: Any) -> None:
        for part in self.parts:
            part.scaler_loaded(scaler)

    def update_begins(self, scaler: Any, new_scale: Any) -> None:
        for part in self.parts:
            part.update_begins(scaler, new_scale)

    def update_ended(self, scaler: Any, new_scale: Any) -> None:
        for part in self.parts:
            part.update_ended(scaler, new_scale)

    def loop_known(self) -> None:
        for part in self.parts:
            part.loop_known()

    def abandon(self, reason: str) -> None:
        """Let every part go; called where one of them failed."""
        failure: Exception | None = None
        for part in self.parts:
            try:
                part.abandon(reason)
            except Exception as error:
                # The others must still be told.
                failure = error
        if failure is not None:
            raise failure
