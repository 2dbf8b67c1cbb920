"""Everything that looks at numbers: overflows, diagnoses, distributions, headroom.

Puts the parts together and passes the moments of the loop on to them, each part guarded by itself:
one that fails is gone alone. Observes only; nothing here changes a gradient or a random stream.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpwatch.events import Event
from mpwatch_agent.diagnosing import Diagnoser
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.gradient_watch import GradientWatch
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
        guard = shield.guard_part
        self._locate_over = guard("overflow location", self.locator.step_over)
        self._diagnose_over = guard("diagnoses", self.diagnoser.step_over)
        self._diagnose_whole = guard("diagnoses of optimizers", self.diagnoser.gradients_whole)
        self._locate_whole = guard("whole gradients", self.locator.gradients_whole)
        self._locate_clip = guard("norm of a clip", self.locator.clip_ended)
        self._diagnose_clip = guard("order of clip and unscale", self.diagnoser.clipped)
        self._locate_concluded = guard("end of a window", self.locator.step_concluded)
        self._diagnose_concluded = guard("weights after a step", self.diagnoser.step_concluded)
        self._sample = guard("distribution of gradients", self.gradients.gradients_whole)
        self._sample_ends = guard("size of an update", self._sample_over)
        self._sampling = sampling
        self.headroom = HeadroomWatch(gate, loop, sampling)
        self._headroom_begins = guard("headroom of activations", self.headroom.forward_begins)
        self._headroom_ends = guard("end of headroom", self.headroom.forward_over)
        # Called from a hook on the root itself, which no other guard surrounds.
        loop.sees_forward = shield.guard("a forward's arguments", self._forward_begins)
        loop.hears_losses = guard("losses", self._backward_begins)
        loop.windows.backward_ended = guard("micro-batch flags", self.locator.backward_ended)
        sampling.whole, sampling.clipped = self._whole, self._clipped
        sampling.concluded = self._concluded
        if self.locator.flags.mode != "off":
            sampling.arm = self.locator.flags.arm
        self.windows = WindowWatch(loop, self.diagnoser.raise_)
        self._window_over = guard("diagnoses of windows", self.windows.step_over)
        loop.discards = guard("discarded windows", self.windows.discarded)
        sampling.clip_seen = guard("clips of a window", self.windows.clip_begins)
        _take_settings(sampling, settings)
        self._replaying: Replaying | None = None
        if settings.get("replay_batch"):
            self._replaying = Replaying(settings["replay_batch"], tell, say)
        if settings.get("dump_bad_batch") and directory is not None:
            from mpwatch_agent.bad_batch import Keeper

            self.locator.keeper = Keeper(Path(directory))

    # --- moments of a micro-batch ---------------------------------------------------------

    def _forward_begins(self, root: Any, arguments: Any, named: Any) -> None:
        if self._replaying is not None:
            self._replaying.forward_begins(root)
        self.locator.witness.forward_begins(root, arguments, named)
        if self.headroom.looking:
            # A forward that led to no backward.
            self._headroom_ends()
        if self.headroom.due():
            self._headroom_begins(root)

    def _backward_begins(self, tensors: Any, micro: MicroBatch) -> None:
        if self.headroom.looking:
            self._headroom_ends()
        self.locator.backward_begins(tensors, micro)

    # --- moments of a window ----------------------------------------------------------------

    def _whole(self, track: OptimizerTrack, optimizer: Any, norm: Any) -> None:
        if track.steps == 0:
            self._diagnose_whole(track, optimizer)
        self._locate_whole(track, optimizer, norm)
        if self.gradients.due(track):
            with self._sampling.own_time():
                self._sample(track, optimizer)

    def _clipped(self, norm: Any) -> None:
        self._diagnose_clip(norm)
        self._locate_clip(norm)

    def _concluded(self, track: OptimizerTrack, draft: StepDraft) -> None:
        self._locate_concluded(track, draft)
        self._diagnose_concluded(track)

    # --- moments of a scaler ----------------------------------------------------------------

    def unscale_begins(self, scaler: Any, optimizer: Any) -> None:
        """`unscale_` of an enabled scaler."""
        self.diagnoser.unscale_begins(scaler, optimizer)

    def unscale_ends(self, scaler: Any, optimizer: Any, completed: bool) -> None:
        """It returned, or raised."""
        if completed:
            self.locator.unscaled(scaler, optimizer)
        else:
            self.diagnoser.unscale_failed(scaler, optimizer)

    # --- a step is over ---------------------------------------------------------------------

    def before_report(self, draft: StepDraft) -> Event | None:
        """Before the step is reported: what was located, to be said after it."""
        if draft.optimizer == 0:
            self._sample_ends(draft)
        located: Event | None = self._locate_over(draft)
        return located

    def after_report(self, draft: StepDraft, located: Event | None) -> None:
        """The step is reported."""
        if located is not None:
            self._tell(located)
        self._diagnose_over(draft, located)
        if draft.optimizer == 0:
            self._window_over(draft)

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
