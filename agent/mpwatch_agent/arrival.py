"""A tensor of numbers on its way to the host: there at once from a CPU, later from a device.

The CUDA half copies into pinned memory and asks an event; it is unverified on a GPU.
"""

from typing import Any

import torch


class Arrival:
    """`numbers` of a tensor, once `ready`."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: Any = None
        if not values.is_cuda:
            self._host = values
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def ready(self) -> bool:
        """Whether the numbers are there."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> list[Any]:
        """The numbers, nested as the tensor was; only when `ready`."""
        found: list[Any] = self._host.tolist()
        return found
