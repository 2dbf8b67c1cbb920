"""The inputs of an open window's forwards, held by reference until the window ends.

Only where that was asked for, and up to a limit: memory is what people lack. Used by `bad_batch`
(to write them) and `late_forward` (to run them again).
"""

from collections.abc import Iterator
from typing import Any

import torch

HELD_BYTES = 64 << 20


class HeldInputs:
    """Scenes (`witness`) by their micro-batch."""

    def __init__(self) -> None:
        # The micro-batch is held too, so that no other can take its identity.
        self._held: dict[int, tuple[Any, list[Any]]] = {}
        self._bytes = 0

    def hold(self, micro: Any, scenes: list[Any]) -> None:
        """Hold the forwards of a micro-batch, until its window ends."""
        size = sum(
            t.nbytes for scene in scenes for t in all_tensors((scene.arguments, scene.named))
        )
        if self._bytes + size <= HELD_BYTES:
            self._held[id(micro)] = micro, scenes
            self._bytes += size

    def of(self, micro: Any) -> list[Any]:
        """The forwards of `micro`; none where they would have been too much."""
        return self._held.get(id(micro), (micro, []))[1]

    def __len__(self) -> int:
        return len(self._held)

    def window_over(self) -> None:
        """Let go of everything."""
        self._held.clear()
        self._bytes = 0


def all_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in arguments, whatever its type."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from all_tensors(item)
