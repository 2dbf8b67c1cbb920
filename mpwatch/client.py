"""How watchers reach a job: one protocol, and the choice between the live job and its record.

`open_job` gives the live job where its hub answers, else its record; `follow` goes from one to the
other without a gap or a duplicate. The third kind, for tests, is `mpwatch.scripted.ScriptedJob`.
"""

from pathlib import Path
from typing import Final, Protocol

from mpwatch import rendezvous
from mpwatch.commands import Command
from mpwatch.errors import NoAnswer, RecordUnreadable
from mpwatch.following import follow
from mpwatch.live import ANSWER_S, JobOver, LiveJob, hub_is_there, job_is_over, out_of_reach
from mpwatch.queries import ChangesReply, StepsReply
from mpwatch.store import CommandSeen, RunView

__all__ = [
    "JobOver",
    "JobSource",
    "LiveJob",
    "follow",
    "hub_is_there",
    "job_is_over",
    "open_job",
    "out_of_reach",
]

FIRST_ANSWER_S: Final = 1.0


class JobSource(Protocol):
    """A job to watch: live, recorded, or scripted in tests."""

    def changes(self, after: int = 0, limit: int = 1000) -> ChangesReply:
        """The events after cursor `after`, at most `limit`."""

    def view(self) -> RunView:
        """The folded state of the run."""

    def steps(self, first: int = 1, last: int | None = None, points: int = 1000) -> StepsReply:
        """History of the leading optimizer's steps in at most `points` points."""

    def send(self, command: Command, by: str = "person", id: str | None = None) -> str:
        """Hand in a command; returns its request id. A given id is never run twice.

        Raises:
            MpwatchError: refused at once; the text is the reason.
        """

    def outcome(self, id: str, timeout_s: float) -> CommandSeen:
        """Wait for the outcome of the command `id`.

        Raises:
            NoAnswer: none within `timeout_s`.
        """

    def close(self) -> None:
        """Let go of sockets and files."""


def open_job(run_directory: Path, timeout_s: float = FIRST_ANSWER_S) -> JobSource:
    """The live job where its hub answers within `timeout_s`, else its record.

    A hub that is only just starting, or being replaced, is waited for as long.

    Raises:
        NoAnswer: the hub does not answer and there is no record.
        RecordUnreadable: no hub, and the record is missing or unreadable.
    """
    running = hub_is_there(rendezvous.runtime_directory(run_directory)) or not job_is_over(
        run_directory
    )
    apart = out_of_reach(run_directory) if running else None
    if running and apart is None:
        live = LiveJob(run_directory, timeout_s)
        try:
            live.view()
        except (NoAnswer, JobOver):
            live.close()
        else:
            live.timeout_s = ANSWER_S
            return live
    # Not needed where a hub answers, and slow to import.
    from mpwatch.replayed import ReplayedJob

    try:
        return ReplayedJob(run_directory / rendezvous.RECORD_FILE)
    except RecordUnreadable:
        if apart is not None:
            raise NoAnswer(f"{apart}, and there is no record") from None
        if running:
            raise NoAnswer(f"the hub of {run_directory.name} does not answer; try again") from None
        raise
