"""Samples of the machine and of a process tree; nothing that is absent raises."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpwatch import system
from mpwatch.system import SystemSampler

BUSY = """
import sys, subprocess
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
while True:
    line = sys.stdin.readline()
    if not line:
        break
    sum(range(3_000_000))
    print("done", flush=True)
child.communicate()
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    """A process with a child, that works when it is written to."""
    job = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with job:
        assert job.stdout is not None
        assert int(job.stdout.readline()) > 0
        yield job
        assert job.stdin is not None
        job.stdin.close()
        job.wait(20)


def test_the_tree_of_the_job_is_sampled(job: subprocess.Popen[str], tmp_path: Path) -> None:
    assert job.stdin is not None
    assert job.stdout is not None
    sampler = SystemSampler(tmp_path)
    first = sampler.sample([job.pid], 100.0)
    assert (first.job_processes, first.job_cpu_percent) == (2, None)
    assert first.job_resident_bytes is not None
    assert first.job_resident_bytes > 4_000_000
    job.stdin.write("work\n")
    job.stdin.flush()
    job.stdout.readline()
    second = sampler.sample([job.pid], 101.0)
    assert second.job_cpu_percent is not None
    assert second.job_cpu_percent > 0
    assert second.memory_total_bytes is not None
    assert second.memory_used_bytes is not None
    assert 0 < second.memory_used_bytes < second.memory_total_bytes
    assert second.disk_free_bytes is not None


def test_the_tree_is_listed_anew_only_now_and_then(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    sampler = SystemSampler(tmp_path)
    sampler.sample([os.getpid()], 100.0)
    mine = dict(sampler._processes)
    assert job.pid in mine
    extra = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sampler.sample([os.getpid()], 101.0)
    assert extra.pid not in sampler._processes
    sampler.sample([os.getpid()], 101.0 + system.LIST_TREE_EVERY_S)
    assert extra.pid in sampler._processes
    extra.communicate()


def test_processes_that_are_gone_are_no_error(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    sampled = SystemSampler(tmp_path).sample([child.pid], 1.0)
    assert (sampled.job_processes, sampled.job_resident_bytes) == (None, None)


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert SystemSampler(tmp_path / "gone").sample([], 1.0).disk_free_bytes is None


def nvml(**extra: object) -> SimpleNamespace:
    """A library with one card, as nvidia-ml-py presents it."""
    return SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetName=lambda handle: b"Tesla T4",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=16),
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
        nvmlDeviceGetPowerUsage=lambda handle: 70_500,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=93),
        **extra,
    )


def test_a_card_is_sampled_in_our_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    (gpu,) = SystemSampler(tmp_path).sample([], 1.0).gpus
    assert (gpu.name, gpu.memory_used_bytes, gpu.memory_total_bytes) == ("Tesla T4", 3, 16)
    assert (gpu.utilization_percent, gpu.temperature_c, gpu.power_w) == (93.0, 61.0, 70.5)


def test_a_reading_that_a_card_does_not_have_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(handle: object) -> None:
        raise RuntimeError("not supported")

    library = nvml()
    library.nvmlDeviceGetPowerUsage = unsupported
    monkeypatch.setitem(sys.modules, "pynvml", library)
    (gpu,) = SystemSampler(tmp_path).sample([], 1.0).gpus
    assert (gpu.power_w, gpu.temperature_c) == (None, 61.0)


def test_without_a_driver_nvml_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise RuntimeError("no driver")

    library = nvml()
    library.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", library)
    sampler = SystemSampler(tmp_path)
    assert sampler.sample([], 1.0).gpus == sampler.sample([], 2.0).gpus == ()
    assert tries == [1]
