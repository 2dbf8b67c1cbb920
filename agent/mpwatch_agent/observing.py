"""Everything that looks at numbers: overflows, diagnoses, distributions, headroom.

Puts the parts together and passes the moments of the loop on to them, each part guarded by itself:
one that fails is gone alone. Observes only; nothing here changes a gradient or a random stream.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpwatch.events import Event
from mpwatch_agent.diagnosing import UPDATES_LOOKED_AT, Diagnoser
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.gradient_watch import EARLY_STEP, GradientWatch
from mpwatch_agent.headroom import HeadroomWatch
from mpwatch_agent.locating import Locator
from mpwatch_agent.replaying import Replaying
from mpwatch_agent.sampling import Sampling
from mpwatch_agent.shield import Gate, Shield
from mpwatch_agent.tracks import MicroBatch, OptimizerTrack
from mpwatch_agent.window_watch import WindowWatch

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.roots import Roots


class Observing:
    """The parts, and the moments they hear of.

    `tell` sends an event at once, `say` prints a line of ours, `directory` is the run's.
    """

    def __init__(
        self,
        shield: Shield,
        gate: Gate,
        loop: "Loop",
        roots: "Roots",
        sampling: Sampling,
        settings: dict[str, Any],
        tell: Callable[[Event], None],
        say: Callable[[str], None],
        directory: str | None,
    ) -> None:
        self.locator = Locator(gate, loop, roots, settings.get("locate") or "auto")
        self.diagnoser = Diagnoser(loop, roots, tell)
        self.gradients = GradientWatch(loop, roots, sampling, self.locator.witness)
        self._tell = tell
        self._quiet = False
        self.headroom = HeadroomWatch(gate, loop, sampling)
        self._loop = loop
        # The step that begins now is one whose activations are looked at, in its first forward.
        self._headroom_due = False
        guard = shield.guard_part
        self._locate_over = guard("overflow location", self.locator.step_over)
        self._diagnose_over = guard("diagnoses", self.diagnoser.step_over)
        self._diagnose_whole = guard("diagnoses of optimizers", self.diagnoser.gradients_whole)
        self._diagnose_clip = guard("order of clip and unscale", self.diagnoser.clipped)
        self._diagnose_concluded = guard("weights after a step", self.diagnoser.step_concluded)
        self._sample = guard("distribution of gradients", self._take_sample)
        self._sample_ends = guard("size of an update", self._sample_over)
        self._headroom_begins = guard("headroom of activations", self.headroom.forward_begins)
        self._watch_forward = guard("forwards after an overflow", self.locator.late.forward_begins)
        self._headroom_ends = guard("end of headroom", self.headroom.forward_over)
        # Called from a hook on the root itself, which no other guard surrounds.
        loop.sees_forward = shield.guard("a forward's arguments", self._forward_begins)
        loop.hears_losses = guard("losses", self._backward_begins)
        loop.windows.backward_ended = guard("micro-batch flags", self.locator.backward_ended)
        sampling.whole = guard("whole gradients", self._whole)
        sampling.clipped = guard("norm of a clip", self._clipped)
        sampling.concluded = guard("end of a window", self._concluded)
        self._quiet_over = guard("a quiet step", self._is_quiet)
        if self.locator.flags.mode != "off":
            sampling.arm = self.locator.flags.arm
        self.windows = WindowWatch(loop, self.diagnoser.raise_)
        self._window_over = guard("diagnoses of windows", self.windows.step_over)
        loop.discards = guard("discarded windows", self.windows.discarded)
        sampling.clip_seen = guard("clips of a window", self.windows.clip_begins)
        self._sampling = sampling
        _take_settings(sampling, settings)
        self._replaying: Replaying | None = None
        if settings.get("replay_batch"):
            self._replaying = Replaying(settings["replay_batch"], tell, say)
        if settings.get("dump_bad_batch") and directory is not None:
            from mpwatch_agent.bad_batch import Keeper

            self.locator.keeper = Keeper(Path(directory))
            self.locator.witness.keeps = True

    # --- moments of a micro-batch: lean, each call of a function costs microseconds ----------

    def _forward_begins(self, root: Any, arguments: Any, named: Any) -> None:
        """`root` is a weak reference."""
        if self._replaying is not None:
            self._replaying.forward_begins(root())
        locator = self.locator
        locator.witness.forward_begins(root, arguments, named)
        if locator.late.trace.left:
            self._watch_forward(root())
        if self._headroom_due or self.headroom.looking:
            # Hooks that are still on: a forward that led to no backward.
            self._headroom_ends()
            if self._headroom_due:
                self._headroom_due = False
                self._headroom_begins(root())

    def _backward_begins(self, tensors: Any, micro: MicroBatch) -> None:
        if self.headroom.looking:
            self._headroom_ends()
        self.locator.backward_begins(tensors, micro)

    # --- moments of a window ----------------------------------------------------------------

    def _whole(self, track: OptimizerTrack, optimizer: Any, norm: Any) -> None:
        if track.steps == 0:
            self._diagnose_whole(track, optimizer)
        self.locator.gradients_whole(track, optimizer, norm)
        every = self._sampling.gradients_every
        if every and (track.steps == EARLY_STEP or (track.steps + 1) % every == 0):
            self._sample(track, optimizer)

    def _take_sample(self, track: OptimizerTrack, optimizer: Any) -> None:
        if self._loop.tracks.leader in (None, track):
            with self._sampling.own_time():
                self.gradients.gradients_whole(track, optimizer)

    def _clipped(self, norm: Any) -> None:
        if self._loop.still_scaled:
            self._diagnose_clip(norm)
        self.locator.clip_ended(norm)

    def _concluded(self, track: OptimizerTrack, draft: StepDraft) -> None:
        self.locator.step_concluded(track, draft)
        self.diagnoser.window_over()
        if track.steps <= UPDATES_LOOKED_AT:
            self._diagnose_concluded(track)

    # --- moments of a scaler ----------------------------------------------------------------

    def optimizer_made(self) -> None:
        """Other parameters have come."""
        self.locator.order.forget()
        self.diagnoser.optimizer_made()

    def unscale_ends(self, scaler: Any, optimizer: Any, completed: bool) -> None:
        """`unscale_` of an enabled scaler returned, or raised."""
        if completed:
            self.locator.unscaled(scaler, optimizer)
        else:
            self.diagnoser.unscale_failed(scaler, optimizer)

    # --- a step is over ---------------------------------------------------------------------

    def before_report(self, draft: StepDraft) -> Event | None:
        """Before the step is reported: what was located, to be said after it."""
        if self._quiet_over(draft):
            return None
        if draft.optimizer == 0:
            self._sample_ends(draft)
        located: Event | None = self._locate_over(draft)
        return located

    def is_plain(self) -> bool:
        """Whether the step that has just ended was quiet, and nothing is under way."""
        return (
            self._quiet
            and self._replaying is None
            and not (self._headroom_due or self.headroom.looking)
            and self.locator.is_plain()
        )

    def step_noted(self, draft: StepDraft) -> None:
        """A step like the quiet one before it is over, some time ago."""
        self.locator.step_noted(draft)
        self._window_over(draft)

    def after_report(self, draft: StepDraft, located: Event | None) -> None:
        """The step is reported."""
        if located is not None:
            self._tell(located)
        if not self._quiet:
            self._diagnose_over(draft, located)
        if draft.optimizer == 0:
            self._window_over(draft)

    def _is_quiet(self, draft: StepDraft) -> bool:
        """A step like those before it, with nothing under way: remembered, and that is all."""
        if draft.optimizer == 0:
            self._headroom_due = self.headroom.due()
        self._quiet = (
            draft.optimizer == 0
            and self.locator.keeper is None
            and not self.locator.late.busy
            and not (self.gradients.busy or self.headroom.busy)
            and self.diagnoser.is_quiet(draft)
            and not self.locator.has_bad_loss(draft)
        )
        if self._quiet:
            draft.locate_us = self.locator.flags.window_over(len(draft.window))
        return self._quiet

    def _sample_over(self, draft: StepDraft) -> None:
        self.gradients.step_concluded(not draft.unusual(), draft.step)
        for event in (*self.gradients.arrived(), *self.headroom.arrived()):
            self._tell(event)

    def last_lines(self) -> list[str]:
        """What a person should read at the end of the run."""
        return self.diagnoser.last_lines()


def _take_settings(sampling: Sampling, settings: dict[str, Any]) -> None:
    for name in ("gradients_every", "activations_every", "gradients_exact"):
        if settings.get(name) is not None:
            setattr(sampling, name, settings[name])
