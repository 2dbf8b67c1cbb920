"""The names of parameters and modules as the script's own roots give them.

A parameter that no known root owns is named by its place in the optimizer. Names are text of the
script: cleaned here.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from mpwatch.vocabulary import clean_text

_COMPILED = "_orig_mod."


class Named(NamedTuple):
    """A parameter's full name, and the module that owns it ("" where no root is known)."""

    parameter: str
    module: str


class Names:
    """Names of the parameters of `roots`, taken when asked for."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._names: dict[int, Named] = {}
        self._position: dict[int, int] = {}
        found = list(roots)
        for root in found:
            prefix = f"{type(root).__name__}." if len(found) > 1 else ""
            for path, module in root.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    full = f"{path}.{name}" if path else name
                    owner = path or type(root).__name__
                    self._add(parameter, prefix, full, owner)

    def _add(self, parameter: Any, prefix: str, full: str, owner: str) -> None:
        if id(parameter) in self._names:
            # A tied weight keeps the name of the module that registered it first.
            return
        self._position[id(parameter)] = len(self._position)
        self._names[id(parameter)] = Named(
            clean_text(prefix + full.replace(_COMPILED, ""), 200),
            clean_text(prefix + owner.replace(_COMPILED, ""), 200),
        )

    def of(self, parameter: Any, group: int, index: int) -> Named:
        """The name of a parameter, that is number `index` of an optimizer's group `group`."""
        known = self._names.get(id(parameter))
        if known is not None:
            return known
        shape = "x".join(str(size) for size in parameter.shape) or "scalar"
        return Named(f"parameter {index} of group {group} ({shape})", "")

    def position(self, parameter: Any) -> int | None:
        """The place in the order of registration, None for a parameter of no known root."""
        return self._position.get(id(parameter))
