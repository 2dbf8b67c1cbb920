"""The two hooks around the forward of a root that runs in another precision.

Put on only where that was asked for. They pickle to something harmless, copy to themselves and
do nothing for any module but their own, so that saved models and EMA copies carry no trace.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpwatch_agent.shield import Gate

_is_compiling = torch.compiler.is_compiling


class _Around:
    mpwatch_owns = True

    def __init__(self, module: nn.Module, gate: Gate, act: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._gate = gate
        self._act = act

    def _is_for(self, module: nn.Module) -> bool:
        gate = self._gate
        if (gate.compiles and _is_compiling()) or not gate.open or gate.elsewhere():
            return False
        return self._module() is module and not torch._C._is_tracing()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Around":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class Before(_Around):
    """Called last before a root's forward: `act(module)`."""

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if self._is_for(module):
            self._act(module)


class After(_Around):
    """Called first after it, also after an exception: `act(output)` makes the new output."""

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return self._act(output) if self._is_for(module) else None


def hook(
    module: nn.Module, gate: Gate, before: Callable[..., Any], after: Callable[..., Any]
) -> list[Any]:
    """Put both on; the handles."""
    return [
        module.register_forward_pre_hook(Before(module, gate, before)),
        module.register_forward_hook(After(module, gate, after), prepend=True, always_call=True),
    ]
