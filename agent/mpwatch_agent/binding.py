"""Taking a rank: one process of a run is rank R of an attempt, the rest stay silent.

The lock file of a rank also keeps its counters, so that a process which takes the rank over (a
launcher restarted its worker) goes on counting. A killed process leaves them at most one batch old.
"""

import contextlib
import os
import platform
import resource
import struct
from pathlib import Path
from typing import Any

import torch

from mpwatch import rendezvous
from mpwatch.events import AgentBound
from mpwatch_agent.entry import ENVIRONMENT_KEY

# libzmq ends the process when it cannot open one of its own.
DESCRIPTORS_NEEDED = 64
_COUNTERS = struct.Struct("<QQQ")
# Frames of a killed process may have been sent after its last entry.
_SEQUENCE_GAP = 100_000


class RankPlace:
    """The rank is ours: `process` counts who had it before, `steps` and `sequence` go on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.sequence, self.steps, self.process = 0, 0, 0
        data = os.pread(descriptor, _COUNTERS.size, 0)
        if len(data) == _COUNTERS.size:
            sequence, self.steps, self.process = _COUNTERS.unpack(data)
            self.sequence = sequence + _SEQUENCE_GAP

    def write(self, sequence: int, steps: int) -> None:
        """Keep where the counters stand; a full disk is no reason to stop."""
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _COUNTERS.pack(sequence, steps, self.process + 1), 0)


def descriptors_left() -> int:
    """How many more file descriptors this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return DESCRIPTORS_NEEDED
    return limit - len(os.listdir("/proc/self/fd"))


def take_rank(runtime: Path, attempt: int, rank: int) -> RankPlace | None:
    """Take the lock of `rank` for the life of this process; None: another process has it."""
    descriptor = rendezvous.try_lock(runtime / f"rank-{attempt}-{rank}")
    return None if descriptor is None else RankPlace(descriptor)


def restore_environment(spec: dict[str, Any]) -> None:
    """Children of a process that trains start clean: no agent in loader workers."""
    os.environ.pop(ENVIRONMENT_KEY, None)
    before = spec.get("pythonpath")
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before


def describe_process(process: int) -> AgentBound:
    """Who took the rank."""
    pid = os.getpid()
    return AgentBound(
        pid=pid,
        process_start_time=rendezvous.process_start_time(pid),
        process=process,
        world_size=number_from("WORLD_SIZE", 1),
        host=platform.node(),
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def number_from(variable: str, default: int) -> int:
    """A whole number that a launcher left in the environment."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default
