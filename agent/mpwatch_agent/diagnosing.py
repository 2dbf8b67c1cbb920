"""Raises diagnoses: collects what the loop shows, asks the rules, says each thing once.

Owns what was raised and the calls that led there; the rules are `diagnoses` (steps) and
`setup_checks` (how the loop is put together). At the end what was found is printed on stderr.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.events import DiagnosisRaised, Event, OverflowLocated
from mpwatch_agent import setup_checks
from mpwatch_agent.device import Kept, Reading
from mpwatch_agent.diagnoses import (
    BrokenForward,
    Diagnosis,
    ScheduleAhead,
    SinkingScale,
    StepSeen,
)
from mpwatch_agent.drafts import StepDraft

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.roots import Roots
    from mpwatch_agent.tracks import OptimizerTrack

CALLS = 12
# Steps of an optimizer after which its fp16 weights are looked at.
UPDATES_LOOKED_AT = 3
# Steps that clip scaled gradients before it is said: a script may do it on purpose once.
CLIPS = 2
PRINTED_AT_MOST = 5


class Diagnoser:
    """Diagnoses of one process. `raise_` is for other parts as well."""

    def __init__(self, loop: "Loop", roots: "Roots", tell: Callable[[Event], None]) -> None:
        self._loop = loop
        self._roots = roots
        self._tell = tell
        self.raised: dict[str, DiagnosisRaised] = {}
        self._first: list[OverflowLocated] = []
        self._located: deque[OverflowLocated] = deque(maxlen=PRINTED_AT_MOST)
        self._overflows = 0
        self._rules = (SinkingScale(), BrokenForward(), ScheduleAhead())
        self.calls: deque[str] = deque(maxlen=CALLS)
        # Optimizers that were looked at, by identity; forgotten when another one is made.
        self._checked: set[int] = set()
        self._restored: set[int] = set()
        # (norm, scale) of a clip in this window that came before any unscale.
        self._clip: tuple[float | None, float | None] | None = None
        self._clips = 0
        self.was_quiet = False

    def raise_(self, diagnosis: Diagnosis) -> None:
        """Say `diagnosis`, unless it was said in the same words."""
        event = DiagnosisRaised(
            name=diagnosis.name,
            severity=diagnosis.severity,
            step=self._loop.steps,
            evidence=diagnosis.evidence,
            advice=diagnosis.advice,
        )
        earlier = self.raised.get(event.name)
        if earlier is None or earlier.evidence != event.evidence:
            self.raised[event.name] = event
            self._tell(event)

    # --- moments ----------------------------------------------------------------------------

    def is_quiet(self, draft: StepDraft) -> bool:
        """Whether a step like the quiet one before it has nothing to tell the rules."""
        before, after = draft.scale_before, draft.scale_after
        return (
            self.was_quiet
            and not draft.skipped_by_scaler
            and draft.located is None
            and (draft.found_inf is None or draft.found_inf == 0.0)
            and not (type(before) is float and type(after) is float and after > before)
        )

    def step_over(self, draft: StepDraft, located: OverflowLocated | None) -> None:
        """A step of any optimizer is over."""
        if located is not None:
            # The first one is the cause of many others.
            (self._located if self._first else self._first).append(located)
            self._overflows += 1
        if draft.optimizer:
            return
        scaler = self._loop.scaler if draft.checked else None
        before, after = _number(draft.scale_before), _number(draft.scale_after)
        seen = StepSeen(
            step=draft.step,
            applied=not draft.unusual(),
            overflowed=draft.unusual() or located is not None,
            bad_loss=any(
                isinstance(loss, float) and not math.isfinite(loss)
                for micro in draft.window
                for loss in micro.losses
            ),
            scale_before=before,
            scale_after=after,
            growth_interval=None if scaler is None else scaler._growth_interval,
            learning_rates=draft.learning_rates,
            module="" if located is None or located.where != "forward" else located.module or "",
        )
        self.was_quiet = seen.applied and not seen.overflowed and not seen.bad_loss
        for rule in self._rules:
            found = rule.step(seen)
            if found is not None:
                self.raise_(found)

    def unscale_begins(self, scaler: Any, optimizer: Any) -> None:
        """`unscale_` of an enabled scaler, by the script or by the scaler's own step."""
        self.calls.append("unscale_")
        if self._clip is not None:
            self._clip_came_first()
        if id(optimizer) not in self._checked:
            self._look_once(optimizer, scaler)

    def unscale_failed(self, scaler: Any, optimizer: Any) -> None:
        """`unscale_` raised."""
        state = scaler._per_optimizer_states.get(id(optimizer))
        stages = torch.amp.grad_scaler.OptState
        if state is not None and state["stage"] is not stages.READY:
            stepped = state["stage"] is stages.STEPPED
            track = self._loop.tracks.of(optimizer)
            self.raise_(setup_checks.unscaled_twice(track, self.calls, stepped))

    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.step` of an enabled scaler."""
        self.calls.append("scaler.step")
        if self._clip is not None:
            self._clip_came_first()
        if id(optimizer) not in self._checked:
            self._look_once(optimizer, scaler)

    def scaler_step_failed(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.step` raised."""
        track, steps = self._loop.tracks.of(optimizer), self._loop.steps
        self._raise_if(setup_checks.without_gradients(optimizer, track, steps, self._roots))

    def scaler_updated(self) -> None:
        """`GradScaler.update` returned."""
        self.calls.append("update")

    def scaler_loaded(self, scaler: Any) -> None:
        """`GradScaler.load_state_dict` returned."""
        self._restored.add(id(scaler))

    def clipped(self, norm: Reading) -> None:
        """A clip is about to change gradients that may carry the scale."""
        if self._clip is None:
            value = norm.take() if isinstance(norm, Kept) else _number(norm)
            self._clip = (value, _number(self._loop.scale_reading()))

    def window_over(self) -> None:
        """A step has ended its window."""
        self._clip = None

    def _clip_came_first(self) -> None:
        """What was clipped is unscaled only now: gradients did carry the scale."""
        clip, self._clip = self._clip, None
        if clip is None or clip[1] == 1.0:
            return
        self._clips += 1
        if self._clips >= CLIPS and "clipped_before_unscale" not in self.raised:
            self.raise_(setup_checks.clipped_scaled(*clip, self._clips))

    def gradients_whole(self, track: "OptimizerTrack", optimizer: Any) -> None:
        """A window of an optimizer is whole, before its update."""
        if track.steps == 0:
            self._raise_if(setup_checks.vanishing_eps(optimizer, self._roots))

    def optimizer_made(self) -> None:
        """An identity may be another optimizer's now."""
        self._checked.clear()

    def step_concluded(self, track: "OptimizerTrack") -> None:
        """One of the first steps of an optimizer has ended: are its fp16 weights still finite?"""
        optimizer = track.ref()
        if optimizer is not None:
            self._raise_if(setup_checks.broken_update(optimizer, self._roots))

    # --- the end ----------------------------------------------------------------------------

    def last_lines(self) -> list[str]:
        """What a person should read at the end of the run."""
        lines = []
        if self._overflows:
            lines.append(f"{self._overflows} overflow{'s' * (self._overflows > 1)} located:")
            lines += [f"  {overflow_line(each)}" for each in self._first]
            between = self._overflows - len(self._first) - len(self._located)
            lines += [f"  ... {between} more ..."] if between else []
            lines += [f"  {overflow_line(each)}" for each in self._located]
        for each in self.raised.values():
            if each.severity != "info":
                lines.append(
                    f"{each.severity}: {each.name}: {each.evidence} (as of step {each.step})"
                )
                lines += [f"  advice: {each.advice}"] if each.advice else []
        return lines

    def _look_once(self, optimizer: Any, scaler: Any) -> None:
        track = self._loop.tracks.of(optimizer)
        self._checked.add(id(optimizer))
        self._raise_if(setup_checks.fp16_weights(optimizer, self._roots))
        if track.steps == 0 and id(scaler) not in self._restored:
            self._raise_if(setup_checks.scaler_not_restored(optimizer, scaler))

    def _raise_if(self, diagnosis: Diagnosis | None) -> None:
        if diagnosis is not None:
            self.raise_(diagnosis)


def overflow_line(event: OverflowLocated) -> str:
    """One overflow in one line."""
    micro = "" if event.micro_batch is None else f", micro-batch {event.micro_batch}"
    module = f" ({event.module})" if event.module else ""
    kind = event.nonfinite or "not finite"
    return (
        f"step {event.step}{micro}: {kind} in {event.parameter}{module}, {event.where};"
        f" {event.verdict}: {event.evidence}"
    )


def _number(reading: Reading) -> float | None:
    return reading if isinstance(reading, float) else None
