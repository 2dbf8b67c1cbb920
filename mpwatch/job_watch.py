"""What the hub sees of the job beside its events: the keeper's file, the processes, the machine.

Part of the hub's process. Reads files and /proc (the script's output among them), says what it
finds through the hub, and knows when nothing is left to serve.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mpwatch import keeper_tail, rendezvous
from mpwatch.hub import Hub
from mpwatch.keeper_tail import KeeperTail
from mpwatch.output_tail import OutputTail
from mpwatch.system import SystemSampler

SAMPLE_EVERY_S: Final = 5.0
LOOK_FOR_LIFE_EVERY_S: Final = 0.5
GONE_FOR_S: Final = 2.0
WAIT_FOR_QUIET_S: Final = 1.5
# Started without a keeper, before any rank has shown up.
WAIT_FOR_FIRST_RANK_S: Final = 60.0

Process = tuple[int, int | None]


class JobWatch:
    """Looks at the job from outside; `over` when there is nothing left to serve."""

    def __init__(self, directory: Path, run_file: dict[str, Any], hub: Hub) -> None:
        """Watch the job in `directory`, whose run.json says `run_file`."""
        self._hub = hub
        self._keeper = run_file.get("keeper")
        self._tail = KeeperTail(directory / rendezvous.KEEPER_FILE)
        state = hub.record.fold.state
        self._output = OutputTail(directory, state.output_offset, state.output_lines)
        self._sampler = SystemSampler(directory)
        self._sampled_at = 0.0
        self._looked_at = 0.0
        self._alive_at = self._started_at = time.monotonic()
        self._exit_entries: list[dict[str, Any]] = []
        self._exit_read_at = 0.0
        self.over = False

    def read_keeper(self, quiet: Callable[[], bool]) -> None:
        """Tell what the keeper wrote. `quiet` waits a moment and says whether no agent spoke."""
        now = time.time()
        for entry in self._tail.entries():
            kind = entry.get("event")
            if kind == "spawned":
                self.tell_exits()
                self._job_started(entry, now)
            elif kind == "exited":
                self._exit_entries.append(entry)
                self._exit_read_at = time.monotonic()
            elif kind == "ended":
                self.over = True
        # What the script said last comes before its exit; other ranks may go on speaking.
        if self._exit_entries:
            waited = time.monotonic() - self._exit_read_at
            if quiet() or waited > WAIT_FOR_QUIET_S:
                self.tell_exits()

    def _job_started(self, entry: dict[str, Any], now: float) -> None:
        event = keeper_tail.job_started(entry)
        if event is not None:
            at = keeper_tail.time_of(entry, now)
            self._hub.job_started(event, keeper_tail.attempt_of(entry), at, now)

    def tell_exits(self) -> None:
        """Tell of exits that were read and not told yet."""
        entries, self._exit_entries = self._exit_entries, []
        if entries:
            # The keeper has read the output to its end before it wrote this.
            self.tell_output(ended=True)
        for entry in entries:
            event = keeper_tail.job_exited(entry)
            if event is not None:
                at = keeper_tail.time_of(entry, time.time())
                self._hub.job_exited(event, keeper_tail.attempt_of(entry), at)

    def tell_output(self, ended: bool = False) -> None:
        """Tell what the script printed; `ended`: nothing more will come of it."""
        now = time.time()
        for line in self._output.look(time.monotonic(), ended):
            self._hub.say(line, now)

    def close(self) -> None:
        """Tell the rest of the output, if there is nothing left to serve, and let go of it."""
        if self.over:
            self.tell_output(ended=True)
        self._output.close()

    def sample(self) -> None:
        """Sample the machine now and then, while the job runs."""
        now = time.monotonic()
        if self._hub.job_is_over() or now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        roots = [pid for pid, started in self._processes() if rendezvous.is_alive(pid, started)]
        if roots:
            self._hub.say(self._sampler.sample(roots, now), time.time())

    def _processes(self) -> list[Process]:
        """The job as this run knows it: what the keeper spawned last, and the ranks."""
        state = self._hub.record.fold.state
        known: list[Process] = []
        if state.attempts and state.attempts[-1].pid and state.attempts[-1].ended_at is None:
            known.append((state.attempts[-1].pid, state.attempts[-1].process_start_time))
        ranks = state.ranks.values()
        return known + [(r.pid, r.process_start_time) for r in ranks if r.pid is not None]

    def look_for_life(self) -> None:
        """Over when keeper and job are gone; by pid and start time, since pids are reused."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_LIFE_EVERY_S:
            return
        if now - self._looked_at > GONE_FOR_S:
            self._alive_at = now  # this hub was stopped itself
        self._looked_at = now
        known, keeper = self._processes(), self._keeper
        if isinstance(keeper, dict) and isinstance(keeper.get("pid"), int):
            known.append((keeper["pid"], keeper.get("start_time")))
        elif not known and now - self._started_at < WAIT_FOR_FIRST_RANK_S:
            return
        if any(rendezvous.is_alive(pid, started) for pid, started in known):
            self._alive_at = now
        elif now - self._alive_at > GONE_FOR_S:
            self.over = True
