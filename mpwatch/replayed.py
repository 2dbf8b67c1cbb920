"""A job as its record tells it: the same questions, the same answers, no job needed."""

from pathlib import Path

from mpwatch.answers import answer
from mpwatch.asking import Asking
from mpwatch.queries import AnyQuery, AnyReply
from mpwatch.recorded import Reader
from mpwatch.store import CommandSeen


class ReplayedJob(Asking):
    """A job from its record alone; commands are refused."""

    def __init__(self, record: Path) -> None:
        """Open the record file.

        Raises:
            RecordUnreadable: with the one line to show.
        """
        self._reader = Reader(record)

    @property
    def damage(self) -> str | None:
        """One line on what of the record could not be read; None where all could."""
        return self._reader.damage

    def _ask(self, query: AnyQuery) -> AnyReply:
        return answer(query, self._reader)

    def outcome(self, id: str, timeout_s: float) -> CommandSeen:
        """The outcome as recorded; nothing more will come, so it does not wait."""
        return super().outcome(id, 0.0)

    def close(self) -> None:
        """Close the record."""
        self._reader.close()
