"""One training step as a plain script writes it: precision, accumulation, optimizer, one window.

Runs on whatever tensors the mode around it makes, fake or real, and announces each phase to a
callback. Used by `track_phases`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mpwatch_agent.track_subject import (
    Configuration,
    Subject,
    apply_checkpointing,
    half_of,
    make_optimizer,
    replace_parameters,
)
from mpwatch_agent.tracker import DATA, tensors_in

FULL = torch.float32
"""Weights of O0 and O1, whatever the factory made them."""


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parameters that a backward from here would reach."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        waiting += [following for following, _ in node.next_functions]


class Step:
    """The module in one configuration, ready to run windows; `claim` says what belongs to whom."""

    def __init__(self, subject: Subject, configuration: Configuration) -> None:
        self.subject, self.configuration = subject, configuration
        self.module = subject.factory()
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"the factory returned {type(self.module).__name__}, not a Module")
        self.module.train()
        level = configuration.precision[:2]
        if level in ("O2", "O3"):
            half = half_of(configuration.precision)
            replace_parameters(
                self.module, lambda t: t.to(half) if t.is_floating_point() else t.clone()
            )
        elif any(p.is_floating_point() and p.dtype != FULL for p in self.module.parameters()):
            replace_parameters(
                self.module, lambda t: t.to(FULL) if t.is_floating_point() else t.clone()
            )
        if configuration.checkpointing == "full":
            apply_checkpointing(self.module)
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        if not self.trained:
            raise ValueError("the module has no parameter that requires a gradient")
        self.masters: list[nn.Parameter] = []
        if level == "O2":
            self.masters = [nn.Parameter(p.detach().float()) for p in self.trained]
        self.optimizer = make_optimizer(configuration.optimizer, self.masters or self.trained)
        self.variables: dict[str, Any] = {}

    @property
    def has_states(self) -> bool:
        """Whether a first update leaves states behind; plain SGD does not."""
        return self.configuration.optimizer != "sgd"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward's context."""
        if self.configuration.precision.startswith("O1"):
            return torch.autocast("cpu", dtype=half_of(self.configuration.precision))
        return contextlib.nullcontext()

    def update(self) -> None:
        """The optimizer step; O2 copies gradients to its fp32 masters and weights back."""
        for master, parameter in zip(self.masters, self.trained, strict=bool(self.masters)):
            if parameter.grad is not None:
                master.grad = parameter.grad.to(torch.float32)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.trained, strict=bool(self.masters)):
                parameter.copy_(master)
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.trained:
            parameter.grad = None

    def _forward(self, phase: Callable[[str], None]) -> torch.Tensor:
        """The loss of a fresh batch. Like a script's variables, the last batch, output and loss
        each stay referenced until the next one is there."""
        phase(DATA)
        batch = self.variables["batch"] = self.subject.inputs(self.configuration.micro_batch)
        phase("forward")
        with self.autocast():
            output = self.variables["output"] = self.module(*map(self._accepted, batch))
            phase("loss")
            loss: torch.Tensor = self.subject.loss(output, *batch)
        self.variables["loss"] = loss
        return loss

    def _accepted(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input as the module takes it: floats in the type of its weights."""
        if not tensor.is_floating_point():
            return tensor
        half = self.configuration.precision[:2] in ("O2", "O3")
        return tensor.to(half_of(self.configuration.precision) if half else FULL)

    def warm_up(self, phase: Callable[[str], None]) -> None:
        """Bring the step to where a second window finds it: states exist, no gradients.

        Instead of a whole window: a forward, zero gradients for the parameters in its graph, and
        one update by the implementation that takes the fewest operators.
        """
        for parameter in list(_leaves(self._forward(phase))):
            parameter.grad = torch.zeros_like(parameter)
        # Without the graph, as backward would have left them.
        self.variables = {
            name: [tensor.detach() for tensor in tensors_in(value)]
            for name, value in self.variables.items()
        }
        phase("optimizer")
        groups = self.optimizer.param_groups
        kept = [(group["foreach"], group["fused"]) for group in groups]
        for group in groups:
            group["foreach"], group["fused"] = True, False
        self.update()
        for group, (foreach, fused) in zip(groups, kept, strict=True):
            group["foreach"], group["fused"] = foreach, fused

    def window(self, phase: Callable[[str], None]) -> None:
        """Run a window as a script does."""
        micro_batches = self.configuration.accumulation_steps
        for _ in range(micro_batches):
            loss = self._forward(phase)
            phase("backward")
            (loss / micro_batches if micro_batches > 1 else loss).backward()  # type: ignore[no-untyped-call]
        phase("optimizer")
        self.update()
