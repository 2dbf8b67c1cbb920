"""Fetches the points of the plots, and only when there may be new ones.

A thousand points at most, rolled up by whoever answers: the length of the run costs nothing here.
"""

from typing import Final

from mpwatch.client import JobSource
from mpwatch.queries import StepPoint
from mpwatch.store import RunView

EVERY_S: Final = 0.5
# The record lags behind the view by its commits; then it has caught up or never will.
TRIES: Final = 6


class Plotting:
    """The newest points."""

    def __init__(self, wanted: int) -> None:
        """`wanted` points at most; the screen changes it with its size."""
        self.wanted = wanted
        self.points: tuple[StepPoint, ...] = ()
        self._key: tuple[int, int, int] | None = None
        self._tries = 0
        self._read_at: float | None = None

    def forget(self) -> None:
        """Another history: nothing of the old one stays."""
        self.points, self._key = (), None

    def read(self, job: JobSource, view: RunView, now: float) -> None:
        """Ask for points if something changed since and it is time."""
        if self._read_at is not None and 0 <= now - self._read_at < EVERY_S:
            return
        key = (view.steps, view.superseded, self.wanted)
        if key != self._key:
            self._key, self._tries = key, 0
        elif self._tries >= TRIES or self._reached(view.steps):
            return
        self._tries += 1
        self._read_at = now
        points = job.steps(1, None, self.wanted).points
        # The same object while nothing changed, so that nobody draws for nothing.
        if points != self.points:
            self.points = points

    def _reached(self, steps: int) -> bool:
        if not self.points:
            return steps == 0
        return self.points[-1].first_step + self.points[-1].count - 1 >= steps
