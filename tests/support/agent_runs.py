"""Runs a script under the agent alone: a real ROUTER socket in the test takes the events."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import zmq

from mpwatch import codec, rendezvous, wire
from mpwatch.events import AgentExited, Event, StepFinished

ROOT = Path(__file__).resolve().parents[2]
INJECT = ROOT / "agent" / "mpwatch_agent" / "inject"
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "agent", "tui"))
DEADLINE_S = 120.0


def plain_environment(**extra: str) -> dict[str, str]:
    """The environment of a child that finds the packages, one thread, no colours."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MPWATCH_", "_MPWATCH"))}
    return {**keep, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **extra}


class Run(Protocol):
    """What has an end: a Popen or a run of the forge."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""


class Listener:
    """A hub's place, taken by the test: keeps every event, can send commands."""

    def __init__(self, runtime: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = wire.hub_socket(self.context, rendezvous.agent_endpoint(runtime))
        self.events: list[tuple[codec.Frame, Event]] = []
        self.peer: bytes | None = None

    def drain(self, wait_s: float) -> None:
        """Take what arrives within `wait_s`."""
        if not self.socket.poll(int(wait_s * 1000)):
            return
        while self.socket.poll(0):
            self.peer, *parts = self.socket.recv_multipart()
            payload = wire.open_message(parts, wire.EVENTS)
            self.events.extend(codec.decode_frames(codec.split_batch(payload)))

    def follow(self, *runs: Run) -> None:
        """Take what arrives until `runs` have ended and the watched one said its last word."""
        end = time.monotonic() + DEADLINE_S
        before = len(self.of(AgentExited))
        while None in [run.poll() for run in runs]:
            assert time.monotonic() < end, f"not ended within {DEADLINE_S} s"
            self.drain(0.02)
        # One that was killed, or never had anything to say, is given a moment only.
        end = time.monotonic() + 0.2
        while len(self.of(AgentExited)) == before and time.monotonic() < end:
            self.drain(0.05)

    def until(self, kind: type[Event], count: int = 1, deadline_s: float = DEADLINE_S) -> Any:
        """Wait for the `count`-th event of `kind` and return it."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            found = self.of(kind)
            if len(found) >= count:
                return found[count - 1]
            self.drain(0.2)
        raise AssertionError(f"no {kind.__name__} number {count} in {deadline_s} s")

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def steps(self, optimizer: int = 0) -> list[StepFinished]:
        return [s for s in self.of(StepFinished) if s.optimizer == optimizer]

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@contextmanager
def listening(runtime: Path) -> Iterator[Listener]:
    listener = Listener(runtime)
    try:
        yield listener
    finally:
        listener.close()


def specification(runtime: Path, **settings: Any) -> dict[str, Any]:
    """What the keeper leaves in the environment of an agent."""
    return {
        "run_id": "test",
        "attempt": 1,
        "run_directory": str(runtime),
        "runtime_directory": str(runtime),
        "pythonpath": SOURCES,
        "keeper_pid": os.getpid(),
        "settings": settings,
    }


def start(
    script: Path,
    runtime: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> subprocess.Popen[bytes]:
    """Start `script` under the agent, as the keeper would."""
    env = plain_environment(_MPWATCH_AGENT=json.dumps(specification(runtime, **settings)))
    env["PYTHONPATH"] = os.pathsep.join([str(INJECT), SOURCES])
    env.update(environment or {})
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=script.parent,
    )
