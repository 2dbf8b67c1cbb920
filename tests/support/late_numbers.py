"""Makes the numbers of a CPU as late as a device's: for tests of what is done where they are."""

from typing import Any

import torch

from mpwatch_agent import device


class _Event:
    """Done when it is asked for the second time, as a device's is a step later."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        self._asked = 2


class _Ring(device.PinnedRing):
    def __init__(self, slots: int = device.RING_SLOTS) -> None:
        self._host = torch.empty(slots, dtype=torch.float64)
        self._next = 0

    def mark(self) -> Any:
        return _Event()


def be_late() -> None:
    """From now on, in this process."""
    device.CPU_IS_LATE = True
    device.PinnedRing = _Ring  # type: ignore[misc]
