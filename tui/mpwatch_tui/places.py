"""Where a run can be asked: its hub, its record, its files; what tests replace by a script.

Everything here may block for as long as a hub keeps silent; only `watching` calls it, off the
thread that draws.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from mpwatch import rendezvous, runs
from mpwatch.client import JobSource, LiveJob, hub_is_there, job_is_over, out_of_reach
from mpwatch.glance import evidence_of
from mpwatch.store import RunView
from mpwatch_tui.picture import Facts

# Short, since nothing else is looked at meanwhile; long enough for a busy machine.
LIVE_ANSWER_S: Final = 1.5


class Places(Protocol):
    """Where to ask, and what can be done besides asking."""

    def hub_is_there(self) -> bool:
        """Whether some hub holds the run."""

    def is_over(self) -> bool:
        """Whether nothing will follow."""

    def out_of_reach(self) -> str | None:
        """Why the hub of a job that runs cannot be asked from here; None where it can."""

    def live(self) -> JobSource:
        """The job behind its hub; survives the hub."""

    def record(self) -> JobSource:
        """The job's record. Raises RecordUnreadable."""

    def facts(self, view: RunView | None) -> Facts:
        """What files tell, completed by what events told."""

    def revive(self) -> None:
        """Begin to start a new hub for a job that has lost its own; does not wait for it."""

    def stop_now(self) -> str:
        """End the script at once; returns the line to show."""


class RunPlaces:
    """The places of a run directory."""

    def __init__(
        self,
        run_directory: Path,
        revive: Callable[[Path], None],
        stop_now: Callable[[Path], str],
        replay: bool = False,
    ) -> None:
        self._directory = run_directory
        self._revive, self._stop_now = revive, stop_now
        self._replay = replay

    def hub_is_there(self) -> bool:
        if self._replay:
            return False
        return hub_is_there(rendezvous.runtime_directory(self._directory))

    def is_over(self) -> bool:
        return self._replay or job_is_over(self._directory)

    def out_of_reach(self) -> str | None:
        return out_of_reach(self._directory)

    def live(self) -> JobSource:
        return LiveJob(self._directory, LIVE_ANSWER_S)

    def record(self) -> JobSource:
        # Not needed while a hub answers, and slow to import.
        from mpwatch.replayed import ReplayedJob

        return ReplayedJob(self._directory / rendezvous.RECORD_FILE)

    def facts(self, view: RunView | None) -> Facts:
        run = runs.read_run(self._directory)
        if run is None:
            return Facts(run_id=self._directory.name, state="lost")
        evidence = runs.with_agent_files(run, None if view is None else evidence_of(view))
        described = runs.described_attempts(run, evidence)
        last = run.attempts[-1] if run.attempts else None
        return Facts(
            run_id=run.run_id,
            name=run.name,
            state=runs.state_of(run, evidence),
            attempt=last.n if last is not None else 1,
            started_at=run.attempts[0].started_at if run.attempts else run.started_at or None,
            ended_at=None if last is None else last.ended_at,
            exit_code=run.exit_code,
            cause=described[-1]["cause"] if described else None,
        )

    def revive(self) -> None:
        # It waits for the hub; the screen goes on meanwhile.
        threading.Thread(target=self._revive, args=(self._directory,), daemon=True).start()

    def stop_now(self) -> str:
        return self._stop_now(self._directory)
