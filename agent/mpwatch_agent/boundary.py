"""The boundary: the one place where commands take effect, never inside a window.

Looks for commands at most 10 times a second, gives each exactly one outcome, pauses, and ends the
script when it is asked to. Returns the exception that ends the script instead of raising it:
the hook that asked raises it, outside everything that catches.
"""

import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mpwatch import commands, rendezvous
from mpwatch.events import (
    AgentStopping,
    CommandApplied,
    CommandRefused,
    Event,
    Heartbeat,
    TrainingPaused,
    TrainingUnpaused,
)
from mpwatch_agent.loop import Loop
from mpwatch_agent.orphan import Orphan
from mpwatch_agent.outbox import Outbox

LOOK_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0
UNPAUSE_WITHOUT_HUB_S = 60.0
# A script that swallows SystemExit this often gets SIGTERM.
STOPS_BEFORE_SIGTERM = 3
MAX_REMEMBERED = 1000

_request_decoder = msgspec.msgpack.Decoder(commands.CommandRequest)


class Boundary:
    """Commands and limits of one run; `act` is called where a command may take effect."""

    def __init__(
        self,
        loop: Loop,
        flush: Callable[[], None],
        max_steps: int | None = None,
    ) -> None:
        self._loop = loop
        self._outbox: Outbox | None = None
        self._run_directory: Path | None = None
        self._flush = flush
        self._max_steps = max_steps
        self._last_look = 0.0
        # A command that was found before this was a place to answer it.
        self._arrived: bytes | None = None
        self._outcomes: OrderedDict[str, Event] = OrderedDict()
        # Commands that wait for the next training forward, and who decides about them there: a
        # note when applied, None to be asked again, ValueError to refuse.
        self.defers: Callable[[commands.SetAccumulation], str | None] | None = None
        self.prepares: Callable[[], None] | None = None
        self._deferred: list[tuple[str, commands.SetAccumulation]] = []
        self._stops = 0
        self._steps_at_stop = -1
        self._paused: commands.Pause | None = None
        # Commands that other parts of the agent carry out: each returns a note.
        self._handlers: dict[type[commands.Command], Callable[[Any], str]] = {}
        self.stop_reason: str | None = None
        # Set by `watch()` loops: their iteration ends instead of an exception being raised.
        self.ends_iteration = False
        # Where the script prints to a terminal of ours: looks whether somebody still reads it.
        self.orphan: Orphan | None = None

    def act(self, *, repeat: bool = True) -> BaseException | None:
        """Let what is asked for take effect, if this is a boundary.

        `repeat` False: a stop that was raised before and swallowed is not raised again here.

        Returns:
            The SystemExit that ends the script, or None.
        """
        if not self._loop.begun or not self._loop.at_boundary():
            return None
        now = time.perf_counter()
        if self._outbox is not None and now - self._last_look >= LOOK_INTERVAL_S:
            self._last_look = now
            if self.orphan is not None:
                self.orphan.look(now)
            self._take_commands()
            if self._paused is not None:
                self._wait()
        if self._deferred and self.prepares is not None:
            self.prepares()
        limit = self._max_steps
        if limit is not None and self._loop.steps >= limit and self.stop_reason is None:
            self._stop("max_steps")
        return self._end_script(repeat) if self.stop_reason is not None else None

    # --- steps that are only noted ----------------------------------------------------------

    def is_plain(self) -> bool:
        """Whether there is nothing to do at the next boundary, as far as is known."""
        nothing_asked = self._arrived is None and not self._deferred
        return self.stop_reason is None and self._paused is None and nothing_asked

    def steps_left(self) -> int:
        """Finished steps until the one after which this ends the script."""
        limit = self._max_steps
        return sys.maxsize if limit is None else max(0, limit - self._loop.steps)

    def next_look(self) -> float:
        """When `is_asked` is worth a call."""
        return self._last_look + LOOK_INTERVAL_S

    def is_asked(self, now: float) -> bool:
        """Whether `act` has something to do, found out without it; this is a boundary."""
        self._last_look = now
        if self._outbox is not None:
            if self.orphan is not None:
                self.orphan.look(now)
            self._arrived = self._arrived or self._outbox.look()
        asked = not self.is_plain()
        if asked:
            self._last_look = now - LOOK_INTERVAL_S
        return asked

    def carries_out(self, kind: type[commands.Command], handler: Callable[[Any], str]) -> None:
        """Have `handler` carry out commands of `kind`: it returns a note or raises ValueError."""
        self._handlers[kind] = handler

    # --- ending -----------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the script at the next boundary, for a reason that arose in the loop itself."""
        if self.stop_reason is None:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        self._say(AgentStopping(step=self._loop.steps, reason=reason))
        self._flush()

    def _end_script(self, repeat: bool) -> BaseException | None:
        if self.ends_iteration:
            return None
        if self._stops and not repeat and self._steps_at_stop == self._loop.steps:
            return None
        self._stops += 1
        self._steps_at_stop = self._loop.steps
        if self._stops > STOPS_BEFORE_SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        return SystemExit(0)

    # --- commands ---------------------------------------------------------------------------

    def _take_commands(self, wait_s: float = 0.0) -> None:
        assert self._outbox is not None
        payload, self._arrived = self._arrived, None
        if payload is None:
            payload = self._outbox.look(wait_s)
        while payload is not None:
            self._answer(payload)
            payload = self._outbox.look()

    def _answer(self, payload: bytes) -> None:
        try:
            request = _request_decoder.decode(payload)
        except msgspec.DecodeError:
            return
        if any(request.id == id for id, _ in self._deferred) or self._is_deferred(request):
            return
        earlier = self._outcomes.get(request.id)
        outcome = earlier if earlier is not None else self._run(request)
        self._answered(request.id, outcome)

    def _answered(self, id: str, outcome: Event) -> None:
        self._outcomes[id] = outcome
        while len(self._outcomes) > MAX_REMEMBERED:
            self._outcomes.popitem(last=False)
        self._say(outcome)
        self._flush()

    def _is_deferred(self, request: commands.CommandRequest) -> bool:
        if request.id in self._outcomes or self.defers is None:
            return False
        try:
            command = commands.decode(request.command)
        except (msgspec.DecodeError, ValueError):
            return False
        if not isinstance(command, commands.SetAccumulation):
            return False
        self._deferred.append((request.id, command))
        return True

    def settle_deferred(self, *, in_backward: bool = False) -> None:
        """A training forward (or, where none is seen, a backward) begins: what waited acts now."""
        if not self._deferred or not self._loop.at_boundary(in_backward=in_backward):
            return
        assert self.defers is not None
        while self._deferred:
            id, command = self._deferred[0]
            step, name = self._loop.steps, commands.name_of(command)
            outcome: Event
            try:
                note = self.defers(command)
                if note is None:
                    return
                outcome = CommandApplied(id=id, command=name, step=step, note=note)
            except ValueError as error:
                outcome = CommandRefused(id=id, command=name, reason=str(error), step=step)
            del self._deferred[0]
            self._answered(id, outcome)

    def _run(self, request: commands.CommandRequest) -> Event:
        step = self._loop.steps
        try:
            command = commands.decode(request.command)
            note = self._apply(command)
        except (msgspec.DecodeError, ValueError) as error:
            return CommandRefused(id=request.id, command="unknown", reason=str(error), step=step)
        return CommandApplied(
            id=request.id, command=commands.name_of(command), step=step, note=note
        )

    def _apply(self, command: commands.Command) -> str:
        match command:
            case commands.Pause():
                already, self._paused = self._paused is not None, command
                return "was paused already" if already else ""
            case commands.Unpause():
                if self._paused is None:
                    return "was not paused"
                self._paused = None
                self._say(TrainingUnpaused(step=self._loop.steps))
                return ""
            case commands.StopAtBoundary():
                if self.stop_reason is not None:
                    return "was stopping already"
                self._paused = None
                self._stop("stop_at_boundary")
                return ""
            case commands.SetSampling():
                return self._set_sampling(command)
            case _ if type(command) in self._handlers:
                return self._handlers[type(command)](command)
            case commands.LocateOverflow():
                return self._loop.sampling.watch_everything(command.steps, self._loop.steps)
            case _:
                raise ValueError(f"{commands.name_of(command)} is not built into this agent")

    def _set_sampling(self, command: commands.SetSampling) -> str:
        asked: dict[str, int | bool] = {
            name: value
            for name in command.__struct_fields__
            if (value := getattr(command, name)) is not None
        }
        return self._loop.sampling.set(asked)

    # --- pause ------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Stay here until unpaused, with signs of life; a lost hub ends a pause after 60 s."""
        self._say(TrainingPaused(step=self._loop.steps))
        self._flush()
        began = time.perf_counter()
        try:
            self._wait_for_unpause()
        except BaseException:
            # Ctrl+C and the like: the script's own clean-up must not be held here again.
            self._paused = None
            raise
        finally:
            self._flush()
            now = time.perf_counter()
            self._loop.phases.restart(now)
            self._loop.sampling.not_ours(now - began)

    def _wait_for_unpause(self) -> None:
        beat = seen = time.monotonic()
        while self._paused is not None:
            self._take_commands(wait_s=0.2)
            if self._paused is None:
                return  # nothing that says "paused" may follow the unpause
            now = time.monotonic()
            if now - beat >= HEARTBEAT_S:
                beat = now
                if self._hub_lives():
                    seen = now
                self._say(Heartbeat())
                self._flush()
            if now - seen > UNPAUSE_WITHOUT_HUB_S and not self._paused.stay:
                self._paused = None
                self._say(TrainingUnpaused(step=self._loop.steps, reason="no hub for 60 s"))

    def _hub_lives(self) -> bool:
        if self._run_directory is None:
            return False
        endpoint = rendezvous.read_json(self._run_directory / rendezvous.ENDPOINT_FILE)
        if endpoint is None or not isinstance(endpoint.get("pid"), int):
            return False
        return rendezvous.is_alive(endpoint["pid"], endpoint.get("start_time"))

    def at_exit(self) -> None:
        """The interpreter ends: what is still asked for gets its outcome."""
        self._max_steps = None
        self.ends_iteration = True
        if self._outbox is None:
            return
        for id, command in self._deferred:
            self._say(_ended(id, command, self._loop.steps))
        self._deferred.clear()
        payload = self._arrived or self._outbox.look()
        while payload is not None:
            self._refuse_or_grant(payload)
            payload = self._outbox.look()

    def _refuse_or_grant(self, payload: bytes) -> None:
        try:
            request = _request_decoder.decode(payload)
            command = commands.decode(request.command)
        except (msgspec.DecodeError, ValueError):
            return
        if isinstance(command, commands.StopAtBoundary):
            self._answer(payload)
            return
        self._say(_ended(request.id, command, self._loop.steps))

    def limit(self, max_steps: int) -> None:
        """End the script after so many finished steps of the leading optimizer."""
        self._max_steps = max_steps

    def connect(self, outbox: Outbox, run_directory: Path | None) -> None:
        """From now on commands may come."""
        self._outbox = outbox
        self._run_directory = run_directory

    def _say(self, event: Event) -> None:
        if self._outbox is not None:
            self._outbox.put(event)


def _ended(id: str, command: commands.Command, step: int) -> CommandRefused:
    name = commands.name_of(command)
    return CommandRefused(id=id, command=name, reason="the script has ended", step=step)
