"""Where mpwatch changes a loop because it was asked to: one seam for all who do.

Observing never comes here: `gate.steers` is False and the hooks pass by. A part (virtual
accumulation, precision, a loss scaler) overrides the moments it needs; the parts are asked in
their order. A part that fails must leave the loop as it would be without it: `abandon`.
"""

from typing import Any

from mpwatch_agent.shield import Gate

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Part:
    """One thing that steers the loop. Each method is a moment of it, and does nothing here."""

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

    def swallows_values(self, gradients: list[Any]) -> bool:
        """Whether a clip of these gradients' values is to do nothing."""
        return False

    def forward_begins(self, arguments: Any) -> None:
        """A root's training forward begins; commands have acted."""

    def abandon(self, reason: str) -> None:
        """Something failed: from the next boundary on the loop is the script's own again."""


class Steering:
    """All parts, asked in their order; who swallows first decides."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        """Have `part` asked as well, after those that are there."""
        self.parts.append(part)
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
        return any(part.swallows_unscale(scaler, optimizer) for part in self.parts)

    def swallows_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        return any(part.swallows_scaler_step(scaler, optimizer) for part in self.parts)

    def swallows_update(self, scaler: Any) -> bool:
        return any(part.swallows_update(scaler) for part in self.parts)

    def swallows_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(part.swallows_step(optimizer, (args, kwargs)) for part in self.parts)

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
        for part in self.parts:
            answer = part.swallows_clip(tensors)
            if answer is not None:
                return answer
        return None

    def swallows_values(self, gradients: list[Any]) -> bool:
        return any(part.swallows_values(gradients) for part in self.parts)

    def forward_begins(self, arguments: Any) -> None:
        for part in self.parts:
            part.forward_begins(arguments)

    def abandon(self, reason: str) -> None:
        """Let every part go; called where one of them failed."""
        for part in self.parts:
            part.abandon(reason)
