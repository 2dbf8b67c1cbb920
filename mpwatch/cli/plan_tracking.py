"""Starts the tracking child and reads its answers: the only way the planner meets torch.

The child runs a user's code, so it has a deadline, a memory limit and its own session; what it
said before it was killed is kept. Nothing here imports torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from mpwatch.planner.calibration import Run, RunConfiguration

LEAST_LIMIT_BYTES = 4 * 10**9
LAST_WORDS = 10_000
"""bytes of the child's stderr that are looked at"""


class Target(Struct, frozen=True, kw_only=True):
    """The module to track, as the command line names it."""

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    loss: str = "mean"
    timeout_s: float = 60.0
    cpu: bool = False
    """for torch's CPU kernels: their scratch counts"""


class Findings(Struct, kw_only=True):
    """What the child said."""

    runs: list[Run]
    real: bool = False
    """tracked on real tensors, because values matter to the module"""
    flops_per_sample: float | None = None
    failures: list[str]
    """one line each"""
    cause: str | None = None
    """why tracking stopped early or never began"""


def _limit_bytes() -> int:
    """Half of the machine's memory, at least 4 GB: enough for torch, too little to hurt."""
    return max(LEAST_LIMIT_BYTES, int(psutil.virtual_memory().total) // 2)


def _request(target: Target, configurations: Sequence[RunConfiguration]) -> bytes:
    fields = {
        "model": target.model,
        "input_shapes": target.input_shapes,
        "input_dtypes": target.input_dtypes,
        "loss": target.loss,
        "configurations": configurations,
        "cpu": target.cpu,
        "limit_bytes": _limit_bytes(),
    }
    return msgspec.json.encode(fields)


def _exchange(request: bytes, timeout_s: float) -> tuple[bytes, bytes, int | None]:
    """(stdout, stderr, exit code; None when it was killed at the deadline)."""
    environment = {
        **os.environ,
        "MPWATCH_DISABLED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # what is compiled has no operators to look at
    }
    # Files and not pipes: a process that a factory leaves behind would keep a pipe open.
    with TemporaryFile() as asked, TemporaryFile() as out, TemporaryFile() as err:
        asked.write(request)
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "mpwatch_agent.track_child"],
            stdin=asked,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        code = None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(child)
        out.seek(0)
        err.seek(max(0, err.seek(0, os.SEEK_END) - LAST_WORDS))
        return out.read(), err.read(), code


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """End the child and whatever it started, also when it has ended itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _silence(err: bytes, code: int | None, timeout_s: float) -> str | None:
    """Why a child ended without finishing, in one line; None when it finished."""
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no message"
    if code is None:
        return f"not finished after {timeout_s:g} s (--track-timeout)"
    if "No module named 'torch'" in last or "No module named 'mpwatch_agent'" in last:
        return "tracking needs torch beside mpwatch: pip install 'mpwatch[torch]'"
    if code < 0:
        return f"killed by signal {-code}: {last}"
    return f"exit code {code}: {last}" if code else None


def _note(findings: Findings, line: bytes) -> None:
    """Take one answer in; a line that is none (cut off by a kill) is passed over."""
    try:
        message: dict[str, Any] = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return
    kind = message.get("kind")
    if kind == "tracked":
        findings.runs.append(msgspec.convert(message["tracked"], Run))
        findings.real = findings.real or bool(message["real"])
    elif kind == "work":
        findings.flops_per_sample = message["flops_per_sample"]
    elif kind == "failed" and message["configuration"] is None:
        findings.cause = message["cause"]
    elif kind == "failed":
        findings.failures.append(message["cause"])


def track(target: Target, configurations: Sequence[RunConfiguration]) -> Findings:
    """Run the configurations in a child; whatever went wrong is in `cause`, nothing is raised."""
    findings = Findings(runs=[], failures=[])
    out, err, code = _exchange(_request(target, configurations), target.timeout_s)
    for line in out.splitlines():
        _note(findings, line)
    if findings.cause is None:
        findings.cause = _silence(err, code, target.timeout_s)
    if findings.cause is None and len(findings.runs) + len(findings.failures) < len(configurations):
        findings.cause = f"its process ended early (exit code {code})"
    return findings
