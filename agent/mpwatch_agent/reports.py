"""Events on their way out: drafts until their readings arrive, then the outbox.

Owns what waits and who takes it; what is reported is decided elsewhere. Nothing here runs in a
forked child (`abandon`).
"""

import time
from collections import deque
from typing import TYPE_CHECKING

from mpwatch.events import Event, LoopFound, OptimizerDescribed
from mpwatch.vocabulary import clean_text
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.shield import Gate

if TYPE_CHECKING:
    from mpwatch_agent.binding import RankPlace
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.outbox import Outbox
    from mpwatch_agent.roots import Roots


class Reports:
    """Everything one process says; silent where there is no outbox."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._drafts: deque[StepDraft] = deque()
        # What happened before this process was bound.
        self._early: list[Event] = []
        self._place: RankPlace | None = None
        self.outbox: Outbox | None = None

    def connect(self, outbox: "Outbox", place: "RankPlace", first: Event) -> None:
        """From now on events leave this process: `first`, then what was said before."""
        self.outbox, self._place = outbox, place
        place.write(place.sequence, place.steps)
        self.tell(first)
        for event in self._early:
            self.tell(event)

    def tell(self, event: Event) -> None:
        """Send `event` with the next batch."""
        if self.outbox is not None:
            self.release()
            self.outbox.put(event)
        elif not self._gate.bound:
            self._early.append(event)

    def step(self, draft: StepDraft, steps: int) -> None:
        """A step is over, `steps` so far; sent at once where somebody wants to hear of it."""
        outbox = self.outbox
        if outbox is None and self._gate.bound:
            return
        # Made into events with the next batch: together they find warm caches.
        self._drafts.append(draft)
        if draft.unusual() or outbox is None or outbox.due(time.perf_counter()):
            self.flush(steps)

    def keep(self, draft: StepDraft) -> None:
        """A step is over; whoever has noted it sends it as well (`flush`)."""
        if self.outbox is not None or not self._gate.bound:
            self._drafts.append(draft)

    def release(self, wait: bool = False) -> None:
        """Turn drafts whose readings have arrived into events, in their order."""
        while self._drafts and (wait or self._drafts[0].ready()):
            draft = self._drafts.popleft()
            if wait and draft.mark is not None:
                draft.mark.synchronize()
            if self.outbox is not None:
                self.outbox.put(draft.finish(), draft.time)

    def flush(self, steps: int) -> None:
        """Send what waits, now."""
        if self.outbox is not None:
            self.release()
            self.outbox.send(time.perf_counter())
            if self._place is not None:
                self._place.write(self.outbox.sequence, steps)

    def abandon(self) -> None:
        """In a forked child: the socket belongs to the parent."""
        if self.outbox is not None:
            self.outbox.abandon()
            self.outbox = None
        self._drafts.clear()


def loop_found(loop: "Loop", roots: "Roots", compiled: bool) -> LoopFound:
    """What was found of the loop so far."""
    described = []
    for track in loop.tracks.live:
        optimizer = track.ref()
        if optimizer is not None and track.index is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            described.append(
                OptimizerDescribed(
                    index=track.index,
                    name=track.name,
                    parameter_tensors=len(params),
                    parameters=sum(p.numel() for p in params),
                )
            )
    scaler = loop.scaler
    return LoopFound(
        optimizers=tuple(sorted(described, key=lambda d: d.index))[:64],
        roots=roots.names(),
        device=str(loop.device or "cpu"),
        scaler=None if scaler is None else type(scaler).__name__,
        compiled=compiled,
        notes=tuple(clean_text(note, 300) for note in roots.notes[:20]),
    )
