"""How far activations are from overflowing fp16, by module, now and then.

Hooks on every module of a plain root for the length of one forward; only where that cannot
disturb: nothing compiled, scripted or traced, no mode of the script's. Keeps numbers, no tensor.
Checkpointed blocks are run again in the backward, when the hooks are gone.
"""

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpwatch.events import ActivationsSampled, ModuleHeadroom
from mpwatch.vocabulary import clean_text
from mpwatch_agent.arrival import Arrival
from mpwatch_agent.distribution import FP16
from mpwatch_agent.forward_trace import hookable, tensors_in
from mpwatch_agent.sampling import Sampling
from mpwatch_agent.shield import Gate

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop

MODULES_AT_MOST = 48
# The second step as well, so that a short run shows something.
EARLY_STEP = 1


class _Look:
    """The hook on one module. Copies and pickles to something that does nothing."""

    def __init__(self, watch: "HeadroomWatch", name: str) -> None:
        self._watch: HeadroomWatch | None = watch
        self._name = name

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._watch is not None:
            self._watch.look(self._name, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Look":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # `nullcontext().__exit__` takes anything and returns None, without mpwatch installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class HeadroomWatch:
    """Largest activations by module, every `sampling.activations_every` steps."""

    def __init__(self, gate: Gate, loop: "Loop", sampling: Sampling) -> None:
        self._gate = gate
        self._loop = loop
        self._sampling = sampling
        self._handles: list[Any] = []
        self._found: dict[str, torch.Tensor] = {}
        self._first: dict[str, float] = {}
        self._arriving: list[tuple[int, list[str], Arrival]] = []

    @property
    def looking(self) -> bool:
        """Whether the hooks are on."""
        return bool(self._handles)

    @property
    def busy(self) -> bool:
        """Whether numbers are on their way."""
        return bool(self._arriving)

    def due(self) -> bool:
        """Whether the step that begins now is one to look at."""
        every, steps = self._sampling.activations_every, self._loop.steps
        if not every or self._gate.modes:
            return False
        return (steps + 1) % every == 0 or steps - self._loop.steps_before == EARLY_STEP

    def forward_begins(self, root: nn.Module) -> None:
        """Put hooks on the modules of `root`, which is about to run."""
        if self._gate.compiles or isinstance(root, torch.jit.ScriptModule):
            return
        for name, module in hookable(root):
            hook = _Look(self, name or type(root).__name__)
            self._handles.append(module.register_forward_hook(hook))

    def look(self, name: str, output: Any) -> None:
        """A module returned `output`; whatever is wrong with it is not the script's matter."""
        try:
            with torch.no_grad():
                self._look(name, output)
        except RuntimeError:
            self.forward_over()

    def _look(self, name: str, output: Any) -> None:
        ends = [
            torch.stack(torch.aminmax(tensor.detach())).float().abs().amax()
            for tensor in tensors_in(output)
            if type(tensor) is torch.Tensor and tensor.numel() and not tensor.is_complex()
        ]
        if ends:
            largest = torch.stack(ends).amax()
            before = self._found.get(name)
            self._found[name] = largest if before is None else torch.maximum(before, largest)

    def forward_over(self) -> None:
        """The backward begins (or another forward): the hooks go."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._found:
            found, self._found = self._found, {}
            numbers = torch.stack(list(found.values()))
            self._arriving.append((self._loop.steps + 1, list(found), Arrival(numbers)))

    def arrived(self) -> list[ActivationsSampled]:
        """Samples whose numbers are on the host."""
        events = []
        while self._arriving and self._arriving[0][2].ready():
            step, names, arrival = self._arriving.pop(0)
            seen = [
                self._headroom(name, value)
                for name, value in zip(names, arrival.numbers(), strict=True)
            ]
            seen.sort(key=lambda each: each.octaves if each.octaves is not None else -math.inf)
            events.append(ActivationsSampled(step=step, modules=tuple(seen[:MODULES_AT_MOST])))
        return events

    def _headroom(self, name: str, largest: float) -> ModuleHeadroom:
        label = clean_text(name, 200)
        if not math.isfinite(largest):
            return ModuleHeadroom(name=label, max_abs=largest)
        if not largest:
            return ModuleHeadroom(name=label, max_abs=0.0, octaves=math.inf)
        octaves = math.log2(FP16.largest / largest)
        first = self._first.setdefault(name, octaves)
        return ModuleHeadroom(
            name=label, max_abs=largest, octaves=octaves, trend_octaves=octaves - first
        )
