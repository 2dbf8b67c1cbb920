"""Which module's output stopped being finite while its input was: hooks on one forward.

On every module for the length of one call and never longer. Reads outputs, keeps numbers only.
Used on a forward that is run again (`rerun`) and on a batch that was kept (`bad_batch`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from mpwatch.vocabulary import clean_text

DEPTH = 4


class Birth(NamedTuple):
    """Where the first value that is not finite appeared. `low`..`high` is the input's range."""

    module: str
    kind: str
    low: float | None
    high: float | None
    bad_weight: str

    def words(self) -> str:
        """In words, for the evidence of a verdict."""
        if self.bad_weight:
            return f"its parameter {self.bad_weight} is not finite"
        between = ""
        if self.low is not None and self.high is not None:
            between = f" (between {self.low:.4g} and {self.high:.4g})"
        return f"the inputs of {self.module} were finite{between}, its output was not: {self.kind}"


class ForwardTrace:
    """Traces one call of a module. `birth` is None where everything was finite."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        self._names = {id(module): name for name, module in root.named_modules()}
        self._root = type(root).__name__
        self.birth: Birth | None = None
        self.bad_input = ""
        self.bad_output = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Call `call` with hooks on every module, behind whatever hooks the script has there."""
        handles = [
            module.register_forward_hook(self._after, with_kwargs=True) for module in self._modules
        ]
        try:
            output = call()
        finally:
            for handle in handles:
                handle.remove()
        self.bad_output = kind_of(output) is not None
        return output

    def look_at_inputs(self, arguments: Any) -> None:
        """Is the batch itself finite?"""
        for place, tensor in enumerate(tensors_in(arguments)):
            kind = kind_of(tensor)
            if kind is not None and not self.bad_input:
                shape = "x".join(str(size) for size in tensor.shape)
                self.bad_input = f"the batch itself has {kind}: tensor {place} of it ({shape})"

    def _after(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        # Inner modules end first: the first one seen is the innermost.
        if self.birth is not None:
            return
        kind = kind_of(output)
        if kind is None:
            return
        inputs = [*tensors_in(arguments), *tensors_in(named)]
        if any(kind_of(tensor) is not None for tensor in inputs):
            return
        low, high = _range(inputs)
        self.birth = Birth(self._name(module), kind, low, high, bad_weight(module))

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(id(module))
        if name is None:
            return type(module).__name__
        return clean_text(name, 200) if name else self._root


def hookable(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules, by name, that a hook leaves as they are: in training, not compiled or scripted.

    In evaluation an encoder layer of torch's takes a faster way, with other values (where tokens
    are padded), unless it or a module in it has a hook.
    """
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if id(module) in seen or not module.training or scripted or compiled:
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, inner) for name, inner in module.named_children()]


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """The floating tensors in arguments or an output, nested or not."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
        return
    if not depth:
        return
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = vars(value).values() if hasattr(value, "__dataclass_fields__") else ()
    for item in value:
        yield from tensors_in(item, depth - 1)


@torch.no_grad()
def kind_of(value: Any) -> str | None:
    """ "NaN" or "Inf" where any number in `value` is not finite, else None."""
    for tensor in tensors_in(value):
        if not bool(torch.isfinite(tensor).all()):
            return "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
    return None


def _range(inputs: list[torch.Tensor]) -> tuple[float | None, float | None]:
    ends = [torch.aminmax(t.detach().float()) for t in inputs if t.numel() and not t.is_complex()]
    if not ends:
        return None, None
    return min(float(low) for low, _ in ends), max(float(high) for _, high in ends)


def bad_weight(module: nn.Module) -> str:
    """The name of a weight of `module` itself that is not finite, or ""."""
    for name, parameter in module.named_parameters(recurse=False):
        if kind_of(parameter.detach()) is not None:
            return clean_text(name, 100)
    return ""
