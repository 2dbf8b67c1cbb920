"""What an outermost backward is seeded with, so that K script windows add up to one mean.

Each root gets 1/K where the script gave nothing and g/K where it gave g: the same numbers as
`(loss / K).backward()`. Decides nothing about windows; called by `accumulation`.
"""

from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from mpwatch_agent.steering import Arguments

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Where `torch.autograd.backward` takes the gradients of its roots, by position and by name.
_GIVEN = ((1, "grad_tensors"), (4, "grad_variables"))
MAX_CACHED = 32


class Unseedable(Exception):
    """A backward that cannot be seeded; the text says why."""


class Seeds:
    """Divides what a backward starts with; real scalar roots share a cached 1/K."""

    def __init__(self) -> None:
        self._cached: dict[Any, tuple[torch.Tensor, int]] = {}

    def divided(self, arguments: Arguments, k: int) -> Arguments:
        """The arguments of `torch.autograd.backward`, divided by `k`.

        Raises:
            Unseedable: a root whose implicit gradient cannot be replaced.
        """
        args, kwargs = arguments
        tensors: Any = args[0] if args else kwargs.get("tensors")
        if _is_common(tensors, args, kwargs):
            return ((tensors,), (self._scalar(tensors, k),), *args[2:]), kwargs
        if isinstance(tensors, torch.Tensor | GradientEdge):
            roots: tuple[Any, ...] = (tensors,)
        else:
            roots = tuple(tensors or ())
        position, name = next((at for at in _GIVEN if _given(arguments, at) is not None), _GIVEN[0])
        given = _given(arguments, (position, name))
        if given is None:
            given = (None,) * len(roots)
        elif isinstance(given, torch.Tensor):
            given = (given,)
        else:
            given = tuple(given)
        if len(given) != len(roots):
            return arguments  # torch says what is wrong with it
        seeds = tuple(self._seed(root, g, k) for root, g in zip(roots, given, strict=True))
        if args:
            args = (roots, *args[1:])
        else:
            kwargs = {**kwargs, "tensors": roots}
        if len(args) > position:
            args = (*args[:position], seeds, *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: seeds}
        return args, kwargs

    def _seed(self, root: Any, given: Any, k: int) -> Any:
        if given is not None:
            if isinstance(given, torch.Tensor) and not (
                given.is_floating_point() or given.is_complex()
            ):
                raise Unseedable(f"a backward is given a gradient of {given.dtype}")
            return given / k
        if isinstance(root, GradientEdge):
            raise Unseedable("a backward starts at a GradientEdge without a gradient")
        if not (isinstance(root, torch.Tensor) and root.requires_grad):
            return None
        if root.numel() != 1 or not root.is_floating_point():
            return None  # torch refuses it in its own words
        if type(root) not in _PLAIN:
            with torch.no_grad():
                return torch.ones_like(root) / k
        return self._scalar(root, k)

    def _scalar(self, root: torch.Tensor, k: int) -> torch.Tensor:
        key = (k, root.dtype, root.device, root.shape)
        seed, version = self._cached.get(key, (None, 0))
        # A custom function of the script may have written into what it was given.
        if seed is None or seed._version != version:
            with torch.no_grad():
                seed = torch.ones(root.shape, dtype=root.dtype, device=root.device) / k
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = (seed, seed._version)
        return seed


def _is_common(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is `loss.backward()` of a plain loss."""
    return (
        type(tensors) is torch.Tensor
        and len(args) in (2, 3, 4)
        and args[1] is None
        and "grad_variables" not in kwargs
        and tensors.requires_grad
        and tensors.is_floating_point()
        and tensors.numel() == 1
    )


def _given(arguments: Arguments, at: tuple[int, str]) -> Any:
    args, kwargs = arguments
    return args[at[0]] if len(args) > at[0] else kwargs.get(at[1])
