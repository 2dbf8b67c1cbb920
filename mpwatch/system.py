"""Samples the machine and the job's process tree from outside: psutil, and NVML where there is one.

Called by the hub every few seconds, in its loop, so it must be cheap: the tree is listed anew only
now and then, in between only the known processes are read. Nothing here raises; what cannot be
read is None. The NVML part is unverified on a GPU.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from mpwatch.events import GpuSampled, SystemSampled
from mpwatch.vocabulary import clean_text

LIST_TREE_EVERY_S: Final = 15.0


class SystemSampler:
    """Keeps what differences need: processes with their CPU times, the NVML handles."""

    def __init__(self, directory: Path) -> None:
        """Watch the disk that holds `directory`."""
        self._directory = directory
        self._processes: dict[int, psutil.Process] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._roots: frozenset[int] = frozenset()
        self._listed_at: float | None = None
        self._sampled_at: float | None = None
        self._gpus = _Nvml()
        with contextlib.suppress(psutil.Error, OSError):
            psutil.cpu_percent(None)  # the first call has nothing to compare with

    def sample(self, roots: Iterable[int], now: float) -> SystemSampled:
        """One sample; `roots` are the process ids of launcher and ranks, `now` is in seconds."""
        self._list_tree(frozenset(roots), now)
        cpu, used, total = _machine()
        job_cpu, resident = self._job(now)
        return SystemSampled(
            cpu_percent=cpu,
            memory_used_bytes=used,
            memory_total_bytes=total,
            job_cpu_percent=job_cpu,
            job_resident_bytes=resident,
            job_processes=len(self._processes) or None,
            disk_free_bytes=_disk_free(self._directory),
            gpus=self._gpus.sample(),
        )

    def _list_tree(self, roots: frozenset[int], now: float) -> None:
        fresh = self._listed_at is not None and 0 <= now - self._listed_at < LIST_TREE_EVERY_S
        if fresh and roots == self._roots:
            return
        self._listed_at, self._roots = now, roots
        found: dict[int, psutil.Process] = {}
        for pid in roots:
            with contextlib.suppress(psutil.Error, OSError):
                root = self._processes.get(pid) or psutil.Process(pid)
                found[pid] = root
                for child in root.children(recursive=True):
                    found[child.pid] = self._processes.get(child.pid) or child
        self._processes = found

    def _job(self, now: float) -> tuple[float | None, int | None]:
        """CPU in percent of one core since the last sample, and resident bytes, of the tree."""
        seconds: dict[int, float] = {}
        resident = 0
        for pid, process in list(self._processes.items()):
            try:
                times = process.cpu_times()
                resident += process.memory_info().rss
                seconds[pid] = times.user + times.system
            except (psutil.Error, OSError):
                del self._processes[pid]
        before, self._cpu_seconds = self._cpu_seconds, seconds
        elapsed = None if self._sampled_at is None else now - self._sampled_at
        self._sampled_at = now
        if not seconds:
            return None, None
        if elapsed is None or elapsed <= 0:
            return None, resident
        spent = sum(max(0.0, used - before[pid]) for pid, used in seconds.items() if pid in before)
        return 100.0 * spent / elapsed, resident


def _machine() -> tuple[float | None, int | None, int | None]:
    try:
        memory = psutil.virtual_memory()
        return psutil.cpu_percent(None), memory.total - memory.available, memory.total
    except (psutil.Error, OSError):
        return None, None, None


def _disk_free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(os.fspath(directory)).free
    except OSError:
        return None


class _Nvml:
    """NVML, imported at the first sample; where it is absent or fails at start, silent for good."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[int, str, Any]] | None = None

    def sample(self) -> tuple[GpuSampled, ...]:
        if self._handles is None:
            self._handles = self._start()
        return tuple(self._gpu(index, name, handle) for index, name, handle in self._handles)

    def _start(self) -> list[tuple[int, str, Any]]:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
                handles.append((index, clean_text(text, 100), handle))
        except Exception:
            return []
        self._nvml = pynvml
        return handles

    def _gpu(self, index: int, name: str, handle: Any) -> GpuSampled:
        nvml = self._nvml
        memory = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        temperature = _or_none(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        power = _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)
        busy = _or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return GpuSampled(
            index=index,
            name=name,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization_percent=None if busy is None else float(busy),
            temperature_c=None if temperature is None else float(temperature),
            power_w=power,
        )


def _or_none(read: Any) -> Any:
    """What `read` gives; a card that does not support a reading raises for it alone."""
    try:
        return read()
    except Exception:
        return None
