"""The learning rate that a rule gives, put into the groups for the length of a step.

The script's own value is read at the step and put back after it: schedulers and scripts that write
`group["lr"]` find what they left, whatever K is. Steers nothing else.
"""

from typing import Any

from mpwatch_agent import rates
from mpwatch_agent.loop import Loop
from mpwatch_agent.rates import Ramp
from mpwatch_agent.steering import Part


class RatePart(Part):
    """One rule for all optimizers; `say(text)` is told once when it cannot be followed."""

    def __init__(self, loop: Loop, rule: str, phi: float | None, ramp: int, say: Any) -> None:
        self.rule = rule
        self.phi = phi
        self._loop = loop
        self._ramp_length = ramp
        self._ramps: dict[int, Ramp] = {}
        self._own: dict[int, list[tuple[Any, Any]]] = {}
        self._say = say
        self._stopped = False

    def step_begins(self, optimizer: Any) -> None:
        track = self._loop.tracks.of(optimizer)
        if self._stopped or track.serial in self._own or track.depth != 1:
            return
        factor = self._factor(optimizer)
        if factor == 1.0:
            return
        own: list[tuple[Any, Any]] = []
        self._own[track.serial] = own
        for group in optimizer.param_groups:
            if "lr" in group:
                own.append((group, group["lr"]))
                group["lr"] = group["lr"] * factor

    def step_ended(self, optimizer: Any, completed: bool) -> None:
        track = self._loop.tracks.of(optimizer)
        if not track.depth:
            self._put_back(track.serial)

    def _put_back(self, serial: int) -> None:
        for group, rate in self._own.pop(serial, ()):
            group["lr"] = rate

    def _factor(self, optimizer: Any) -> float:
        """For this step, whose window is still open."""
        track = self._loop.tracks.of(optimizer)
        kappa = track.script_windows + 1
        rule = rates.resolved(self.rule, track.name, self.phi)
        counted = [micro.samples for micro in track.window]
        known = [samples for samples in counted if samples is not None]
        batch = sum(known) / kappa if known and len(known) == len(counted) else None
        try:
            target = rates.factor(rule, kappa, batch, self.phi)
        except ValueError as error:
            self._stopped = True
            self._say(str(error))
            return 1.0
        ramp = self._ramps.get(track.serial)
        if ramp is None:
            ramp = self._ramps[track.serial] = Ramp(self._ramp_length)
            ramp.start_at(target)
        return ramp.next(target)

    def abandon(self, reason: str) -> None:
        self._stopped = True
        for serial in [*self._own]:
            self._put_back(serial)
