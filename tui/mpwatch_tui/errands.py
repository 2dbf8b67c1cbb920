"""Commands of this screen: from a key to the one outcome, through hubs that die on the way.

A command has its id from the beginning, so that handing it in again is harmless: a hub answers a
known id and runs it once. The newest command is the one that is shown.
"""

import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

from mpwatch.client import JobOver, JobSource
from mpwatch.commands import Command, name_of
from mpwatch.errors import MpwatchError, NoAnswer
from mpwatch.store import RunView
from mpwatch_tui.picture import Asked, Outcome

GIVE_UP_SENDING_S: Final = 30.0


class _Errand:
    def __init__(self, command: Command, since: float) -> None:
        self.command, self.since = command, since
        self.identifier = secrets.token_hex(8)
        self.sent = False


class Errands:
    """The commands that were asked for, and what became of the newest."""

    def __init__(self, stop_now: Callable[[], str]) -> None:
        self._stop_now = stop_now
        self._wanted: deque[Command | None] = deque()
        self._errand: _Errand | None = None
        self.asked: Asked | None = None

    def want(self, command: Command | None) -> None:
        """Begin with it at the next look; None: stop now. Called by the thread that draws."""
        self._wanted.append(command)

    def begin(self, now: float) -> str | None:
        """Take up what is wanted; what was done at once, in words."""
        done = None
        while self._wanted:
            command = self._wanted.popleft()
            if command is None:
                done = self._stop_now()
                self._errand = None
                self.asked = Asked(words="stop now", at=now, outcome="done", detail=done)
            else:
                self._errand = _Errand(command, now)
                self.asked = Asked(words=name_of(command).replace("_", " "), at=now)
        return done

    def send(self, job: JobSource, now: float) -> None:
        """Hand the newest command in, if that is still to do.

        Raises:
            NoAnswer: the hub is silent; tried again at the next look.
            JobOver: the job has ended.
        """
        errand = self._errand
        if errand is None or errand.sent:
            return
        if now - errand.since > GIVE_UP_SENDING_S:
            self.give_up("the hub does not answer", now)
            return
        try:
            job.send(errand.command, id=errand.identifier)
            errand.sent = True
        except (NoAnswer, JobOver):
            raise
        except MpwatchError as error:
            self.give_up(str(error), now)

    def settle(self, view: RunView, now: float) -> None:
        """Look whether the newest command has its outcome."""
        for seen in view.commands:
            if self._errand is None or seen.id != self._errand.identifier:
                continue
            if seen.outcome == "applied":
                self._end("applied", f"at step {seen.step}", now)
            elif seen.outcome is not None:
                self._end("refused", seen.reason or "", now)

    def give_up(self, reason: str, now: float) -> None:
        """There will be no outcome."""
        self._end("refused", reason, now)

    def _end(self, outcome: Outcome, detail: str, now: float) -> None:
        if self._errand is not None and self.asked is not None:
            self.asked = Asked(words=self.asked.words, at=now, outcome=outcome, detail=detail)
            self._errand = None
