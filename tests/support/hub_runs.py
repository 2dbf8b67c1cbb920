"""A run directory with a real hub process, a stand-in for the agent, and waiting with deadlines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from mpwatch import codec, rendezvous, wire
from mpwatch.client import LiveJob
from mpwatch.errors import MpwatchError
from mpwatch.events import AgentBound, Event, StepFinished

ROOT = Path(__file__).parents[2]
RUN = "run-1"


def until(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """The first true value of `condition`; fails when it does not come in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.01)
    return found


def me() -> dict[str, int | None]:
    """This process, as run.json names one."""
    return {"pid": os.getpid(), "start_time": rendezvous.process_start_time(os.getpid())}


def step(number: int, **fields: Any) -> StepFinished:
    """A finished step with what most tests need."""
    given = {"applied": True, "loss": 1.0 / number, "duration_s": 0.01, "samples": 8, **fields}
    return StepFinished(step=number, **given)


def frame(event: Event, sequence: int, *, rank: int = 0, attempt: int = 1, run: str = RUN) -> bytes:
    """An encoded frame; its time follows from its place, so that order and time agree."""
    moment = 1.8e9 + attempt * 1e6 + sequence * 0.01
    return codec.encode_frame(
        event, run=run, attempt=attempt, rank=rank, sequence=sequence, time=moment
    )


class Agent:
    """Sends events as an agent does, over its own socket, and hears commands."""

    def __init__(self, runtime: Path, rank: int = 0, attempt: int = 1) -> None:
        self.rank, self.attempt, self.sequence = rank, attempt, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = wire.agent_socket(self._context, rendezvous.agent_endpoint(runtime))

    def bind(self, pid: int | None = None) -> None:
        process = me() if pid is None else {"pid": pid, "start_time": None}
        self.say(AgentBound(pid=process["pid"], process_start_time=process["start_time"]))  # type: ignore[arg-type]

    def say(self, *events: Event) -> None:
        frames = []
        for event in events:
            frames.append(frame(event, self.sequence, rank=self.rank, attempt=self.attempt))
            self.sequence += 1
        self.socket.send_multipart(wire.message(wire.EVENTS, codec.encode_batch(frames)))

    def steps(self, first: int, last: int, **fields: Any) -> None:
        self.say(*(step(number, **fields) for number in range(first, last + 1)))

    def hear(self, seconds: float = 10.0) -> dict[str, Any]:
        import msgspec

        assert self.socket.poll(int(seconds * 1000)), "no command came"
        data = wire.open_message(self.socket.recv_multipart(), wire.COMMAND)
        found: dict[str, Any] = msgspec.msgpack.decode(data)
        return found

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


class Run:
    """A run directory whose keeper is this test; hubs are real child processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.runtime = rendezvous.make_runtime_directory(directory)
        rendezvous.write_json(directory / "run.json", {"run_id": RUN, "keeper": me()})
        self.hubs: list[subprocess.Popen[bytes]] = []
        self.agents: list[Agent] = []

    @property
    def record(self) -> Path:
        return self.directory / rendezvous.RECORD_FILE

    def keeper_says(self, event: str, **fields: Any) -> None:
        entry = {"event": event, "time": time.time(), **fields}
        with (self.directory / rendezvous.KEEPER_FILE).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def start_hub(self, *options: str, ready: bool = True) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "mpwatch.hub_process", str(self.directory)]
        hub = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "hub.log").open("ab"),
        )
        self.hubs.append(hub)
        if ready:
            with LiveJob(self.directory, 20.0) as job:
                job.view()
        return hub

    def agent(self, rank: int = 0, attempt: int = 1) -> Agent:
        agent = Agent(self.runtime, rank, attempt)
        self.agents.append(agent)
        return agent

    def end(self, code: int = 0) -> None:
        """What the keeper writes when the script has ended; waits for the hub's end."""
        self.keeper_says("exited", code=code, signal=None, attempt=1)
        self.keeper_says("ended")
        for hub in self.hubs:
            hub.wait(20)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for hub in self.hubs:
            if hub.poll() is None:
                hub.send_signal(signal.SIGCONT)
                hub.kill()
            hub.wait(20)
        shutil.rmtree(self.runtime, ignore_errors=True)


@contextmanager
def a_run(directory: Path) -> Iterator[Run]:
    """A run that is cleaned up whatever happens."""
    run = Run(directory)
    try:
        yield run
    finally:
        run.close()


def steps_seen(job: LiveJob) -> int:
    """Steps of the live view; 0 while no hub answers."""
    try:
        return job.view().steps
    except MpwatchError:
        return 0
