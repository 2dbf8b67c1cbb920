"""In which order a backward reaches the parameters, read from the graph of a loss.

Autograd runs its nodes from the last made to the first and adds to a gradient as soon as its last
contribution is there: the order is known before it happens. Reads numbers of nodes, unpacks no
saved value. Parameters behind an opaque node (reentrant checkpointing) stay unknown.
"""

from typing import Any

import torch

# A graph with more nodes than this is not walked to its end.
MAX_NODES = 50_000
# Graphs walked: the first backwards of a loop show all its losses.
LOOKS = 4


class BackwardOrder:
    """Ranks of parameters by identity, learned from the first windows' losses."""

    def __init__(self) -> None:
        self._rank: dict[int, int] = {}
        self._looks = 0
        # Whether there is a graph to be walked yet.
        self.learning = True

    def learn(self, roots: Any) -> None:
        """Walk the graphs of `roots`, what was passed to `backward`."""
        self._looks += 1
        self.learning = self._looks < LOOKS
        found = _accumulated(roots if isinstance(roots, list | tuple) else (roots,))
        ordered = sorted(found, key=found.__getitem__, reverse=True)
        known = len(self._rank)
        for position, identity in enumerate(ordered):
            self._rank.setdefault(identity, known + position)

    def forget(self) -> None:
        """Other parameters have come: learn anew."""
        self._rank.clear()
        self._looks, self.learning = 0, True

    def rank(self, parameter: Any) -> int | None:
        """The parameter's place, from 0 for the first that a backward reaches."""
        return self._rank.get(id(parameter))


def _accumulated(roots: Any) -> dict[int, int]:
    """By identity of a parameter: the number of the last node that adds to its gradient."""
    stack = [node for root in roots if (node := _node_of(root)) is not None]
    seen = set(stack)
    found: dict[int, int] = {}
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        number = node._sequence_nr()
        for following, _ in node.next_functions:
            if following is None:
                continue
            # By its type: a node of the script's own may have an attribute of any name.
            if type(following).__name__ == "AccumulateGrad":
                identity = id(following.variable)
                found[identity] = min(found.get(identity, number), number)
            elif following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _node_of(root: Any) -> Any:
    return getattr(root, "grad_fn", None) if isinstance(root, torch.Tensor) else None
