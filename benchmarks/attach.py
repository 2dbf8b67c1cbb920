"""What the screen costs: first paint, memory, CPU at 100 steps/s, and how soon a key shows.

A record of a million realistic steps is made first (`--steps N` for fewer). Then, each on a real
pseudo-terminal of 120x40: `replay` of that record, `attach` to a hub that goes on with it while an
agent's stand-in sends 100 steps/s. First paint is process start to the newest step's number on the
screen; what that is without the time spent waiting for a core that others had is printed too.
Run: `python benchmarks/attach.py`.
"""

import argparse
import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import msgspec
import psutil
import zmq
from ingest import realistic_step, start_hub

from mpwatch import codec, rendezvous, wire
from mpwatch.client import LiveJob
from mpwatch.events import AgentBound, Event, OutputLine
from mpwatch.record import Record
from mpwatch.replayed import ReplayedJob

COLUMNS, LINES = 120, 40
RATE = 100
HEADER_STEP = re.compile(rb"step (?:\x1b\[[0-9;]*m)+([0-9]+)\x1b")
BUDGETS = {
    "first paint, replay (s)": 1.0,
    "less waiting for a core, replay (s)": 1.0,
    "memory, replay (MB)": 100.0,
    "first paint, attach (s)": 1.0,
    "less waiting for a core, attach (s)": 1.0,
    "memory, attach (MB)": 100.0,
    "CPU of a core at 100 steps/s (%)": 10.0,
    "key to screen, p95 (ms)": 60.0,
    "agent's send to screen, p99 (ms)": 500.0,
}


def make_record(directory: Path, steps: int) -> None:
    """A record of `steps` steps, and a line of output every hundredth."""
    record = Record(directory / rendezvous.RECORD_FILE, "benchmark")
    dice = random.Random(1)
    kinds = [realistic_step(number, dice) for number in range(1, 2001)]
    events: list[Event] = [AgentBound(pid=os.getpid(), process_start_time=None)]
    began = time.time() - steps / RATE
    sequence = 0
    for number in range(1, steps + 1):
        events.append(msgspec.structs.replace(kinds[number % 2000], step=number))
        if number % 100 == 0:
            text = f"step {number}  loss 2.345  lr 1.0e-3"
            events.append(OutputLine(text=text, number=number // 100, offset=number))
        for event in events:
            place = codec.Frame(
                codec.PROTOCOL, "benchmark", 1, 0, sequence, began + number / RATE, msgspec.Raw()
            )
            data = codec.encode_frame(
                event, run="benchmark", attempt=1, rank=0, sequence=sequence, time=place.time
            )
            record.append(data, place, event)
            sequence += 1
        events = []
        record.commit_if_due(time.time())
    record.close(time.time())


class Terminal:
    """A pseudo-terminal with a verb of mpwatch on it."""

    def __init__(self, *words: str) -> None:
        self.began = time.perf_counter()
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
            os.execv(sys.executable, [sys.executable, "-m", "mpwatch", *words])
        self.seen = bytearray()

    def until(self, *wanted: bytes, seconds: float = 60.0) -> float:
        """Read until one of `wanted` has been written; the moment it was."""
        deadline = time.perf_counter() + seconds
        while not any(each in self.seen for each in wanted):
            left = deadline - time.perf_counter()
            if left <= 0:
                raise TimeoutError(f"not on the screen: {wanted!r}; last {bytes(self.seen[-300:])}")
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 1 << 16)
        return time.perf_counter()

    def drain(self, seconds: float) -> int:
        """Read for a while; how many bytes came."""
        deadline, count = time.perf_counter() + seconds, 0
        while (left := deadline - time.perf_counter()) > 0:
            if select.select([self.master], [], [], left)[0]:
                count += len(os.read(self.master, 1 << 16))
        self.seen.clear()
        return count

    def read_steps(self, seconds: float) -> list[tuple[int, float]]:
        """The step numbers that the header shows in a while, each with the moment it came."""
        deadline, found = time.perf_counter() + seconds, []
        self.seen.clear()
        while (left := deadline - time.perf_counter()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 1 << 16)
                now = time.perf_counter()
                found += [(int(number), now) for number in HEADER_STEP.findall(self.seen)]
                del self.seen[:-100]
        return found

    def key(self, data: bytes, wanted: bytes) -> float:
        """Seconds from a key to what it brings."""
        self.seen.clear()
        began = time.perf_counter()
        os.write(self.master, data)
        return self.until(wanted) - began

    @property
    def screen(self) -> psutil.Process:
        """The process that draws: the guard's child."""
        return psutil.Process(self.pid).children()[0]

    def queued_s(self) -> float:
        """Seconds that guard and screen have waited for a core that others had."""
        pids = [self.pid, self.screen.pid]
        waits = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids]
        return sum(waits) / 1e9

    def peak_mb(self) -> float:
        """The most memory that guard and screen have held, together."""
        pids = [self.pid, self.screen.pid]
        return sum(_high_water_kb(pid) for pid in pids) / 1000

    def close(self) -> None:
        os.write(self.master, b"q")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    os.read(self.master, 1 << 16)
                except OSError:
                    break
        os.waitpid(self.pid, 0)
        os.close(self.master)


def _high_water_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return 0


class Feeder(threading.Thread):
    """An agent's stand-in at 100 steps/s, in batches of 200 ms as the agent sends them."""

    def __init__(self, runtime: Path, step: int) -> None:
        super().__init__(daemon=True)
        self._runtime, self._step = runtime, step
        self.ending = threading.Event()
        self.sent: dict[int, float] = {}

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = wire.agent_socket(context, rendezvous.agent_endpoint(self._runtime))
        dice, sequence = random.Random(2), 0
        place = {"run": "benchmark", "attempt": 1, "rank": 0}
        while not self.ending.wait(0.2):
            frames = []
            events: list[Event] = []
            for _ in range(RATE // 5):
                self._step += 1
                events.append(realistic_step(self._step, dice))
            if not sequence:
                me = os.getpid()
                start = rendezvous.process_start_time(me)
                events.insert(0, AgentBound(pid=me, process_start_time=start, process=1))
            for event in events:
                now = time.time()
                frames.append(codec.encode_frame(event, sequence=sequence, time=now, **place))
                sequence += 1
            self.sent[self._step] = time.perf_counter()
            socket.send_multipart(wire.message(wire.EVENTS, codec.encode_batch(frames)))
        socket.close(linger=0)
        context.term()


def replayed(directory: Path, steps: int) -> dict[str, float]:
    """First paint and memory on the record."""
    terminal = Terminal("replay", str(directory))
    painted = terminal.until(str(steps).encode()) - terminal.began
    queued = terminal.queued_s()
    terminal.drain(4.0)
    memory = terminal.peak_mb()
    terminal.close()
    return {
        "first paint, replay (s)": painted,
        "less waiting for a core, replay (s)": painted - queued,
        "memory, replay (MB)": memory,
    }


def attached(directory: Path, steps: int, seconds: float) -> dict[str, float]:
    """The same on a running job; CPU while it makes 100 steps/s; keys meanwhile."""
    runtime = rendezvous.make_runtime_directory(directory)
    hub = start_hub(directory)
    with LiveJob(directory, 60.0) as job:
        job.view()
    feeder = Feeder(runtime, steps)
    feeder.start()
    try:
        terminal = Terminal("attach", str(directory))
        painted = terminal.until(b"steps/s") - terminal.began
        found = {"first paint, attach (s)": painted}
        found["less waiting for a core, attach (s)"] = painted - terminal.queued_s()
        terminal.drain(5.0)
        before, at = sum(terminal.screen.cpu_times()[:2]), time.perf_counter()
        written = terminal.drain(seconds)
        spent = sum(terminal.screen.cpu_times()[:2]) - before
        found["CPU of a core at 100 steps/s (%)"] = 100 * spent / (time.perf_counter() - at)
        found["written to the terminal (kB/s)"] = written / seconds / 1000
        shown = dict(reversed(terminal.read_steps(seconds)))
        late = sorted(at - feeder.sent[number] for number, at in shown.items())
        found["agent's send to screen, median (ms)"] = 1000 * statistics.median(late)
        found["agent's send to screen, p99 (ms)"] = 1000 * late[int(len(late) * 0.99)]
        keys = []
        wanted = (b"gradient norm", b"time per step", b"loss scale")
        for turn in range(60):
            keys.append(terminal.key(b"p", wanted[turn % 3]))
            # Out of step with the screen's own four looks a second.
            terminal.drain(0.37)
        found["key to screen, median (ms)"] = 1000 * statistics.median(keys)
        found["key to screen, p95 (ms)"] = 1000 * sorted(keys)[int(len(keys) * 0.95)]
        found["memory, attach (MB)"] = terminal.peak_mb()
        terminal.close()
    finally:
        feeder.ending.set()
        feeder.join()
        hub.send_signal(signal.SIGTERM)
        hub.wait(20)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the CPU measurement")
    parser.add_argument("--record", metavar="DIR", help="keep the record here, or use it again")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(arguments.record or place) / "benchmark"
        directory.mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        keeper = {"pid": me, "start_time": rendezvous.process_start_time(me)}
        rendezvous.write_json(
            directory / rendezvous.RUN_FILE,
            {"run_id": "benchmark", "keeper": keeper, "started_at": time.time()},
        )
        if not (directory / rendezvous.RECORD_FILE).exists():
            began = time.perf_counter()
            make_record(directory, arguments.steps)
            print(f"record of {arguments.steps} steps made in {time.perf_counter() - began:.0f} s")
        with ReplayedJob(directory / rendezvous.RECORD_FILE) as job:
            steps = job.view().steps
        found = replayed(directory, steps)
        found |= attached(directory, steps, arguments.seconds)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        budget = BUDGETS.get(name)
        ratio = "" if budget is None else f"   {value / budget:5.2f} of the budget of {budget:g}"
        print(f"{name:36}{value:10.2f}{ratio}")


if __name__ == "__main__":
    main()
