"""Which phase the training thread is in, and how long it stayed in each.

A clock with named hands: every moment of a step belongs to exactly one phase. Time between
phases ("gaps") gets its name when the next phase begins, since only then it is known whose it
was. No torch here; the caller brings the time.
"""

from typing import Any

from mpwatch_agent.memory import MemoryEdges

# What is noted of a loop (`PhaseClock.follow`), and the phase that begins there.
PHASES = {
    "data": "data",
    "drawn": "other",
    "forward": "forward",
    "evaluation": "evaluation",
    "backward": "backward",
    "ended": "other",
    "optimizer": "optimizer",
}


class PhaseClock:
    """Seconds per phase of the step that is running.

    `edges` is set on steps whose memory is sampled: then every change of phase is a reading.
    """

    __slots__ = ("_began", "_seconds", "_since", "edges", "pending_data", "phase")

    def __init__(self, now: float) -> None:
        self.phase = "other"
        self.edges: MemoryEdges | None = None
        self._since = now
        self._began = now
        self._seconds: dict[str, float] = {}
        # Time inside loaders whose batch may yet turn out to be one for evaluation.
        self.pending_data = 0.0

    def enter(self, phase: str, now: float, gap_is: str | None = None) -> None:
        """Leave the current phase for `phase`; `gap_is` names a gap that ends here."""
        left = self.phase
        elapsed = now - self._since
        if left == "data":
            self.pending_data += elapsed
        else:
            name = gap_is or left if left == "other" else left
            seconds = self._seconds
            seconds[name] = seconds.get(name, 0.0) + elapsed
        if self.edges is not None:
            self.edges.edge(left, phase)
        self.phase = phase
        self._since = now

    def settle_data(self, phase: str) -> None:
        """Book the time of loaders not yet booked to `phase`."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self.pending_data
        self.pending_data = 0.0

    def forward_was_not_training(self) -> None:
        """The forward that just ran had no backward: its time is not this step's forward."""
        moved = self._seconds.pop("forward", 0.0)
        self._seconds["other"] = self._seconds.get("other", 0.0) + moved

    def follow(self, marks: list[Any], drew: bool) -> bool:
        """Enter one phase after the other, as noted: a word of `PHASES`, its moment, and so on.

        As `enter` would, in one call, and without readings of memory. `drew` and what is returned:
        whether a batch was drawn since the last backward.
        """
        seconds, phase, since = self._seconds, self.phase, self._since
        moments = iter(marks)
        for mark, now in zip(moments, moments, strict=True):
            name = phase
            if mark == "forward":
                if self.pending_data:
                    self.settle_data("data")
                if phase == "other" and not drew:
                    name = "data"
            elif mark == "evaluation" and self.pending_data:
                self.settle_data("evaluation")
            if phase == "data":
                self.pending_data += now - since
            else:
                seconds[name] = seconds.get(name, 0.0) + now - since
            phase, since = PHASES[mark], now
            if mark == "drawn":
                drew = True
            elif mark == "ended":
                drew = False
        self.phase, self._since = phase, since
        return drew

    def take(self, now: float) -> tuple[float, dict[str, float]]:
        """End the step: its duration in seconds, and the seconds of each phase."""
        self.enter("other", now)
        if self.pending_data:
            self.settle_data("data")
        seconds, self._seconds = self._seconds, {}
        duration, self._began = now - self._began, now
        return duration, seconds

    def restart(self, now: float) -> None:
        """Forget what was measured since the step began (a pause is no part of a step)."""
        self._began += now - self._since
        self._since = now
