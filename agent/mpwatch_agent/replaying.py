"""`--replay-batch`: at the script's first training forward, run a kept batch instead, and end.

The script makes the model as it always does; its weights, inputs and random numbers are replaced
by those that were kept. Says which module was the first that made something not finite.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpwatch.events import DiagnosisRaised, Event


class Replaying:
    """One replay. `say` prints a line of ours, `tell` sends an event."""

    def __init__(
        self, directory: str, tell: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        self._directory = Path(directory)
        self._tell = tell
        self._say = say

    def forward_begins(self, root: Any) -> None:
        """The first training forward of a root.

        Raises:
            SystemExit: always: with 0 where the batch could be run, else with 2.
        """
        from mpwatch_agent.bad_batch import NotReplayable, replay

        try:
            trace = replay(self._directory, root)
        except NotReplayable as error:
            self._say(f"cannot replay: {error}")
            raise SystemExit(2) from None
        if trace.birth is not None:
            words, severity = trace.birth.words(), "fault"
        elif trace.bad_input:
            words, severity = trace.bad_input, "fault"
        else:
            words, severity = "the forward of the kept batch is finite", "info"
        self._say(f"replayed {self._directory}: {words}")
        self._tell(
            DiagnosisRaised(name="replayed_batch", severity=severity, step=0, evidence=words)
        )
        raise SystemExit(0)
