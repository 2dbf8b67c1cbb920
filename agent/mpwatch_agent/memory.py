"""Memory at the edges of phases: what the process holds, read in microseconds.

On a CPU the process's anonymous resident memory (resident minus shared pages of
`/proc/self/statm`; page cache and shared tensors do not count), on CUDA the caching allocator's
live bytes. Nothing is reset: peak counters of the script keep their meaning.
"""

import contextlib
import os
import time
from collections.abc import Callable

import torch

# A reading that takes longer than this makes samples rarer.
DEAR_READING_S = 200e-6

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Anonymous resident bytes through one descriptor that stays open."""

    kind = "resident"

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        fields = os.pread(self._descriptor, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class AllocatedMemory:
    """Live bytes of the CUDA caching allocator (unverified on a GPU)."""

    kind = "allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def close(self) -> None:
        """Nothing is held."""


class MemoryEdges:
    """Collects readings at the edges of phases within one sampled step."""

    def __init__(self, source: ResidentMemory | AllocatedMemory) -> None:
        self._source = source
        self._edges: dict[str, list[int]] = {}
        self.slowest_s = 0.0

    @property
    def kind(self) -> str:
        return self._source.kind

    def edge(
        self, leaving: str, entering: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """One reading at the moment when phase `leaving` ends and `entering` begins."""
        start = clock()
        now = self._source.read()
        self.slowest_s = max(self.slowest_s, clock() - start)
        for phase in (leaving, entering):
            known = self._edges.get(phase)
            if known is None:
                self._edges[phase] = [now, now, now]
            else:
                known[1] = now
                known[2] = max(known[2], now)

    def take(self) -> dict[str, tuple[int, int, int]]:
        """(start, end, peak at an edge) in bytes per phase since the last take."""
        edges = {phase: (e[0], e[1], e[2]) for phase, e in self._edges.items()}
        self._edges = {}
        return edges


def memory_source(device: torch.device | None) -> ResidentMemory | AllocatedMemory | None:
    """What can be read for a loop on `device`; None where nothing can."""
    if device is not None and device.type == "cuda":
        return AllocatedMemory(device)
    try:
        return ResidentMemory()
    except OSError:
        return None
