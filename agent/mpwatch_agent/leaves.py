"""Leaves that a backward reaches and no optimizer owns: their gradients are read by the script.

Walks a graph in Python, which takes about a microsecond per edge; `LeafWatch` spends a bounded
share of the time on it: the first backwards, then now and then, and whenever it is told to.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

# Backwards that are walked in any case, and how much of the time may go into walking after them.
ALWAYS = 8
SHARE = 0.003


def unowned_leaf(roots: Iterable[Any], owned: set[int]) -> torch.Tensor | None:
    """The first leaf below `roots` whose identity is not in `owned`, or None."""
    seen: set[Any] = set()
    waiting: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            waiting.append(root.node)
        elif isinstance(root, torch.Tensor) and root.grad_fn is not None:
            waiting.append(root.grad_fn)
        elif isinstance(root, torch.Tensor) and root.requires_grad and id(root) not in owned:
            return root
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and isinstance(leaf, torch.Tensor) and id(leaf) not in owned:
            return leaf
        waiting.extend(edge[0] for edge in node.next_functions if edge[0] is not None)
    return None


def unowned_input(inputs: Any, owned: set[int]) -> torch.Tensor | None:
    """The first of the `inputs` of a backward that is not in `owned`, or None."""
    if isinstance(inputs, torch.Tensor | GradientEdge):
        inputs = (inputs,)
    elif isinstance(inputs, dict):
        inputs = inputs.values()
    return next((i for i in inputs if isinstance(i, torch.Tensor) and id(i) not in owned), None)


class LeafWatch:
    """Decides which backwards are walked. `suspect` makes it walk the next one."""

    def __init__(self) -> None:
        self.suspect = False
        self._walks = 0
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether a backward without `inputs` would be walked now."""
        return self.suspect or self._walks < ALWAYS or time.perf_counter() >= self._next

    def look(self, roots: Iterable[Any], inputs: Any, owned: set[int]) -> str | None:
        """What is wrong with a backward from `roots`, or None."""
        if inputs is not None:
            found = unowned_input(inputs, owned)
            return None if found is None else _described(found)
        if not self.is_due():
            return None
        begun = time.perf_counter()
        found = unowned_leaf(roots, owned)
        self._walks += 1
        self.suspect = False
        ended = time.perf_counter()
        self._next = ended + (ended - begun) / SHARE
        return None if found is None else _described(found)


def _described(leaf: torch.Tensor) -> str:
    kind = "parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor"
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    return f"a backward reaches a {kind} ({shape}) that no optimizer owns"
