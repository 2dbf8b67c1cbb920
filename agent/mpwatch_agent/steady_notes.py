"""What is noted of a steady loop, the way in and out, and what is made of the notes.

Windows and counts are kept as the ordinary moments keep them; phases, drafts and events are made
five times a second. `Steady` has the moments.
"""

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpwatch_agent import steady_terms
from mpwatch_agent.boundary import LOOK_INTERVAL_S
from mpwatch_agent.device import Later, Reading
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.memory import MemoryEdges
from mpwatch_agent.outbox import BATCH_INTERVAL_S
from mpwatch_agent.phases import PHASES
from mpwatch_agent.shield import belongs_to_script
from mpwatch_agent.tracks import OptimizerTrack

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

# Stays that ended this early are no use: then so many steps are ordinary, twice as many each time.
SHORT_STAY, WAIT_AT_MOST = 2, 256
_clock = time.perf_counter


class Notes:
    """The notes of one process; only the loop's thread comes here."""

    def __init__(self, agent: "Agent", failed: Callable[[str, str], None]) -> None:
        self._agent = agent
        self._gate = agent.gate
        self._loop = agent.loop
        self._windows = agent.loop.windows
        self._losses = agent.loop.losses
        self._reader = agent.loop.reader
        self._sampling = agent.sampling
        self._boundary = agent.boundary
        self._witness = agent.observing.locator.witness
        self._flags = agent.observing.locator.flags
        self._calls = agent.observing.diagnoser.calls
        self._failed_with = failed
        self._broken = False
        # Who is watched, while the gate says steady.
        self._track: OptimizerTrack | None = None
        self._usual = 0
        self._scaler: Any = None
        self._scale: Reading = None
        self._scale_tensor: Any = None
        self._scale_version = self._tracker_version = self._interval = 0
        self._fused = self._flagging = False
        self._schedule: weakref.ref[Any] | None = None
        # Until when, and for how many more steps.
        self._look_at = self._due_at = 0.0
        self._left = self._noted = 0
        # All steps that were only noted, ever.
        self.total = 0
        self._wait = self._last_wait = 0
        # Of the step that is open, and of those that wait.
        self.updating = False
        self._unscaled = False
        # All gradients of its window were looked at, and are finite.
        self._looked = False
        self._marks: list[Any] = []
        self._clips: list[tuple[Reading, bool]] = []
        self._edges: MemoryEdges | None = None
        self.pending: StepDraft | None = None
        self._drafts: list[StepDraft] = []

    # --- in and out -------------------------------------------------------------------------

    def step_over(self, draft: StepDraft) -> None:
        """An ordinary step is over: if the next ones will be like it, they are noted."""
        if self._wait:
            self._wait -= 1
        elif not self._broken:
            try:
                left = steady_terms.steps_alike(self._agent, draft)
                if left > 0:
                    self._begin(draft, left)
            except BaseException as error:
                self._breaks(error)

    def _begin(self, draft: StepDraft, left: int) -> None:
        loop, now = self._loop, _clock()
        track = self._track = loop.tracks.leader
        assert track is not None
        self._usual, self._left, self._noted = track.usual_window, left, 0
        self._scaler = scaler = loop.scaler if draft.checked else None
        self._scale = draft.scale_after
        self._scale_tensor = None if scaler is None else scaler._scale
        if scaler is not None and self._scale_tensor is not None:
            self._scale_version = self._scale_tensor._version
            self._interval = scaler._growth_interval
            self._tracker_version = scaler._growth_tracker._version
        self._fused = bool(getattr(track.ref(), "_step_supports_amp_scaling", False))
        self._flagging = self._usual > 1 and self._flags.window_is_watched(loop.steps + 1)
        schedule = self._agent.observing.windows.schedule() if self._usual > 1 else None
        self._schedule = None if schedule is None else weakref.ref(schedule)
        self._look_at = self._boundary.next_look()
        self._due_at = now + BATCH_INTERVAL_S
        self._edges, loop.phases.edges = loop.phases.edges, None
        self._gate.steady = True

    def leave(self) -> bool:
        """Back to the ordinary moments, with everything as they would have it; returns False."""
        gate, loop = self._gate, self._loop
        if not gate.steady:
            return False
        gate.steady = False
        try:
            self.work_through()
            marks, self._marks = self._marks, []
            loop.drew = loop.phases.follow(marks, loop.drew)
            self._back_off()
        except BaseException as error:
            self._breaks(error)
        finally:
            # Only where something interrupts it: the others come after these.
            while self._drafts:
                self._agent.reports.step(self._drafts.pop(0), loop.steps)
            self._give_back()
        return False

    def _give_back(self) -> None:
        """What is open, as the ordinary moments would have it."""
        loop, track = self._loop, self._track
        assert track is not None
        loop.phases.edges, self._edges = self._edges, None
        pending, self.pending = self.pending, None
        if pending is not None:
            loop.takes_back(track, pending)
        if self.updating:
            self._calls += ("unscale_",) if self._unscaled else ()
            track.whole = True
            loop.updating = track.ref() if loop.lazy else None
            # From a clip on, a number that is still on its way may have hidden what it was.
            clipped = any(type(norm) is Later for norm, _ in self._clips) and not self._looked
            self._agent.observing.locator.goes_on(track, self._unscaled, clipped)
        self._sampling.clips, self._clips = self._clips, []
        self.updating = self._unscaled = self._looked = False
        self._scaler = self._scale_tensor = None

    def _back_off(self) -> None:
        if self._left > 0 and self._noted < SHORT_STAY:
            self._last_wait = min(WAIT_AT_MOST, 2 * self._last_wait or 1)
            self._wait = self._last_wait
        else:
            self._last_wait = 0

    def forget(self) -> None:
        """In a forked child: nothing of this is its own."""
        self._gate.steady = False
        self._drafts.clear()

    def is_asked(self, now: float) -> bool:
        """Whether a command or an end waits for the boundary that this is."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL_S
        try:
            return self._boundary.is_asked(now)
        except BaseException as error:
            self._failed(error)
            return True

    def _failed(self, error: BaseException) -> bool:
        """A moment has raised `error`: the ordinary one follows; what is the script's goes on."""
        try:
            self.leave()
        finally:
            self._breaks(error)
        return False

    def _breaks(self, error: BaseException) -> None:
        """Something failed: no step is only noted any more, which is said once."""
        if belongs_to_script(error):
            raise error
        if not self._broken:
            self._broken = True
            self._failed_with("steady steps", f"{type(error).__name__}: {error}")

    # --- a step is over ---------------------------------------------------------------------

    def _finish(self, draft: StepDraft) -> None:
        """The step is over, and will be told whatever else fails."""
        self._noted += 1
        self.total += 1
        self._left -= 1
        try:
            self._add(draft)
            if self._left > 0 and draft.ended >= self._due_at:
                self._due_at = draft.ended + BATCH_INTERVAL_S
                self.work_through()
                self._agent.reports.flush(self._loop.steps)
                if not self._agent.observing.locator.is_plain():
                    # A loss that came late was not finite: the next forwards are watched.
                    self._left = 0
        except BaseException as error:
            self._failed(error)
        if self._left <= 0 or self._broken:
            self.leave()

    def _add(self, draft: StepDraft) -> None:
        """What is known of a step besides the calls."""
        if self._reader.ring is not None:
            draft.mark = self._reader.mark()
        schedule = None if self._schedule is None else self._schedule()
        if schedule is not None:
            draft.schedule_steps = int(schedule.last_epoch)
        if self._usual > 1:
            draft.locate_us = self._flags.window_over(self._usual)
            self._flagging = self._flags.window_is_watched(draft.step + 1)
        every = self._sampling.memory_every
        if self._edges is not None or (every and draft.step % every == 0):
            self._sample_memory(draft)
        else:
            gate = self._gate
            draft.agent_s, gate.own_s = gate.own_s, 0.0
            draft.sampled_s, gate.sampled_s = gate.sampled_s, 0.0

    def _edge(self, mark: str) -> None:
        """Memory at a change of phase, which is read at once."""
        assert self._edges is not None
        before = self._marks[-2] if self._marks else "ended"
        self._edges.edge(PHASES[before], PHASES[mark])

    def _sample_memory(self, draft: StepDraft) -> None:
        loop = self._loop
        if self._edges is not None:
            self._edges.edge(PHASES[draft.marks[-2]], "other")
        loop.phases.edges = self._edges
        self._sampling.step_over(loop, draft)
        self._edges, loop.phases.edges = loop.phases.edges, None

    def work_through(self) -> None:
        """Make reports of the steps that were noted."""
        drafts, reports = self._drafts, self._agent.reports
        while drafts:
            draft = drafts.pop(0)
            try:
                self._look_over(draft)
                reports.keep(draft)
            except BaseException as error:
                # Told all the same, with what is known of it.
                reports.step(draft, self._loop.steps)
                self._breaks(error)

    def _look_over(self, draft: StepDraft) -> None:
        loop = self._loop
        loop.drew = loop.phases.follow(draft.marks, loop.drew)
        draft.duration_s, draft.phase_s = loop.phases.take(draft.ended)
        draft.marks = []
        self._agent.observing.step_noted(draft)
        if draft.checked:
            self._calls += ("unscale_", "scaler.step", "update")
