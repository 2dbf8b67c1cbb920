"""The seam between hooks and devices: how a number gets from a tensor to an event.

On a CPU a value is read at once (4 us in place). On CUDA it is copied without blocking into a
pinned ring and read one or more steps later, when an event says that it has arrived: never a
synchronisation. The CUDA half is written from torch's documentation and is unverified on a GPU.
"""

from typing import Any

import torch

RING_SLOTS = 4096
# Numbers of a CPU are there at once. Tests make them late, to see what is done where they are.
CPU_IS_LATE = False


def at_once(tensor: torch.Tensor) -> bool:
    """Whether reading `tensor` waits for nothing."""
    return tensor.is_cpu and not CPU_IS_LATE


class Later:
    """A value that is on its way from a device; `value` is None until it has arrived."""

    __slots__ = ("_ring", "_slot")

    def __init__(self, ring: "PinnedRing", slot: int) -> None:
        self._ring = ring
        self._slot = slot

    def take(self) -> float | None:
        """The value; only after `PinnedRing.mark().query()` said that it is there."""
        return self._ring.value(self._slot)


class Kept:
    """A fresh CPU scalar that nobody else holds for long, read when its event is made.

    A value that the script changes in place meanwhile is not reported.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def take(self) -> float | None:
        """The value as it was."""
        if self._tensor._version != self._version or self._tensor.numel() != 1:
            return None
        return _real(self._tensor.detach().item())


Reading = float | Later | Kept | None


class PinnedRing:
    """A ring of pinned host memory that device scalars are copied into (unverified on a GPU)."""

    def __init__(self, slots: int = RING_SLOTS) -> None:
        self._host = torch.empty(slots, dtype=torch.float64, pin_memory=True)
        self._next = 0

    def put(self, tensor: torch.Tensor) -> Later:
        """Start copying a one-element tensor; the oldest slot is given up when the ring is full."""
        slot = self._next % len(self._host)
        self._next += 1
        self._host[slot].copy_(tensor.detach().reshape(()), non_blocking=True)
        return Later(self, slot)

    def value(self, slot: int) -> float:
        """What arrived in `slot`."""
        return float(self._host[slot])

    def mark(self) -> Any:
        """An event that is done when everything put so far has arrived."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


class Reader:
    """Reads one-element tensors for events, without waiting for a device."""

    def __init__(self) -> None:
        self.ring: PinnedRing | None = None

    def read(self, tensor: Any) -> Reading:
        """The value of a real one-element tensor; None for whatever cannot be read safely.

        Subclasses (DTensor and others) are left alone: reading one may communicate. Modes of the
        script do not see this: the shield has switched them off around every hook.
        """
        if type(tensor) is not torch.Tensor:
            return None
        if tensor.is_cpu and not CPU_IS_LATE:
            try:
                value = tensor.item()
            except RuntimeError:
                # More than one element, or wrapped by a transform of functorch.
                return None
            return value if type(value) is float else _real(value)
        return self._read_elsewhere(tensor)

    def keep(self, tensor: Any) -> Reading:
        """Like `read`, but later: for a scalar of its own storage, such as a norm."""
        if type(tensor) is torch.Tensor and at_once(tensor):
            return Kept(tensor)
        return self.read(tensor)

    def _read_elsewhere(self, tensor: torch.Tensor) -> Reading:
        if tensor.numel() != 1 or tensor.is_complex():
            return None
        return self._put(tensor) if tensor.is_cuda or tensor.is_cpu else None

    def _put(self, tensor: torch.Tensor) -> Reading:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if self.ring is None:
            self.ring = PinnedRing()
        with torch.no_grad():
            return self.ring.put(tensor)

    def mark(self) -> Any:
        """None when every reading so far is there already, else an event to `query`."""
        return None if self.ring is None else self.ring.mark()

    def wait(self) -> None:
        """Wait until every reading so far is there: only where an overflow is looked into."""
        mark = self.mark()
        if mark is not None:
            mark.synchronize()


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, float | int) else None


def settle(reading: Reading) -> float | None:
    """The number of a reading whose mark is done."""
    return reading if reading is None or isinstance(reading, float) else reading.take()
