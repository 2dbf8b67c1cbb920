"""The loop as the agent sees it: phases, steps and boundaries.

Fed by `hooks` (guarded there), in the order in which the script does things; turns them into
drafts of steps. Knows no socket and no patch. A step ends at the last of `GradScaler.update` and
`Optimizer.step`; whether it was applied is what the optimizer did, not what the scale says.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from mpwatch.events import Event, WindowDiscarded
from mpwatch_agent.device import Reader, Reading
from mpwatch_agent.drafts import StepDraft, found_inf_of, learning_rates
from mpwatch_agent.losses import Losses
from mpwatch_agent.phases import PhaseClock
from mpwatch_agent.sampling import Sampling
from mpwatch_agent.shield import invisible_to_dynamo
from mpwatch_agent.tracks import MicroBatch, OptimizerTrack
from mpwatch_agent.windows import Before, Windows, sizes_of

# Optimizers beyond this many are counted, not reported step by step (one per parameter happens).
MAX_REPORTED_OPTIMIZERS = 8

Sizes = tuple[int | None, int | None]
_clock = time.perf_counter


class Loop:
    """State of the training loop between hooks; `finished` takes every draft of a step."""

    def __init__(
        self,
        finished: Callable[[StepDraft], None],
        say: Callable[[Event], None],
        sampling: Sampling,
    ) -> None:
        self.reader = Reader()
        self.windows = Windows(self._discarded)
        self.tracks = self.windows.tracks
        self.phases = PhaseClock(_clock())
        self.sampling = sampling
        self.steps_before = 0
        self.scaler: Any = None
        self.device: torch.device | None = None
        self.losses = Losses(self.reader)
        # Told of a root's training forward and its arguments, and of a backward and its
        # micro-batch once the losses are read.
        self.sees_forward: Callable[[Any, Any, Any], None] | None = None
        self.hears_losses: Callable[[Any, MicroBatch], None] | None = None
        self._finished = finished
        self._say = say
        self._batch: Any = None
        self.drew = False
        self.loader_seen = False
        # A backward has been seen: which thread the loop is in is known.
        self.begun = False
        # Drafts that wait for the scaler's update, by their optimizer's serial number.
        self.pending: dict[int, StepDraft] = {}
        # A scaler took part since its last update.
        self.scaled = False
        # The gradients in the window carry the loss scale: no unscale yet.
        self.still_scaled = False
        self._scale_known: tuple[int, int, Reading] = (0, 0, None)
        self._updates_come = True
        self.in_scaler_step: OptimizerTrack | None = None
        self._stepped_in_scaler: StepDraft | None = None
        # What steers a loop without a scaler of its own says: (scale before, after) of the window
        # whose gradients were looked at last; that the step which ends was not taken.
        self.steered_scale: tuple[float, float] | None = None
        self.looked_at_gradients = False
        self.nonfinite = False
        self.step_skipped = False
        # With one optimizer and no faults these can wait for the next hook, which finds the
        # caches warm for all of it: when a backward ended, when which forward began.
        self.lazy = True
        self.forward: tuple[float, bool, Sizes] | None = None
        self.ended_at: float | None = None
        self.ended_well = True
        # The only optimizer, while its window is whole: hooks up to its step have nothing to add.
        self.updating: Any = None
        # Which optimizers step between two steps of the leader: a round.
        self._round: set[int] | None = None
        # Told of micro-batches that were cleared without a step: (optimizer, how many).
        self.discards: Callable[[int, int], None] | None = None
        # Told of the end of each window (`steering`): track, optimizer, draft.
        self.concluded: Callable[[OptimizerTrack, Any, StepDraft], None] | None = None
        self._since_leader: set[int] = set()

    # --- what others ask ------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Finished steps of the leading optimizer, over all processes of this rank."""
        leader = self.tracks.leader
        return self.steps_before + (leader.steps if leader else 0)

    def at_boundary(self, *, in_backward: bool = False) -> bool:
        """Whether a command may act: after the last step of a round, before any new gradient.

        `in_backward`: also where the first backward of a window has just been entered.
        """
        self.settle()
        windows = self.windows
        if windows.unstepped or self.in_scaler_step is not None:
            return False
        if windows.in_backward and not in_backward:
            return False
        if self.pending and self._updates_come:
            return False
        return not windows.stepping and self._round_is_over()

    def takes_back(self, track: OptimizerTrack, draft: StepDraft) -> None:
        """A step that is over waits for its scaler again."""
        if self.in_scaler_step is track:
            self._stepped_in_scaler = draft
        else:
            self.pending[track.serial] = draft

    def at_rest(self) -> bool:
        """Whether no gradient can be there that a clearing would discard (one optimizer)."""
        return self.lazy and self.ended_at is None and not self.windows.unstepped

    def _round_is_over(self) -> bool:
        if self.tracks.leader is None or len(self.tracks.live) <= 1:
            return True
        if self._round is None:
            return all(track.steps for track in self.tracks.live)
        return self._round <= self._since_leader

    # --- data, forward, backward ----------------------------------------------------------

    def loader_begins(self) -> None:
        """A DataLoader's `__next__` was entered."""
        self.settle()
        if self.phases.phase == "forward" and self.windows.forward_was_not_training():
            self.phases.forward_was_not_training()
        self.phases.enter("data", _clock())

    def loader_ends(self, batch: Any) -> None:
        """`__next__` returned, or raised (batch None)."""
        self.phases.enter("other", _clock())
        self.drew = self.loader_seen = True
        if not self.windows.roots_seen:
            self._batch = batch

    def forward_begins(self, now: float, training: bool, sizes: Sizes) -> None:
        """A root's forward was entered from outside, with a batch of `sizes`."""
        # Without a loader, what lies between the last step and the forward is where data come from.
        phases = self.phases
        if not training:
            if phases.pending_data:
                phases.settle_data("evaluation")
            phases.enter("evaluation", now)
            return
        if phases.pending_data:
            phases.settle_data("data")
        phases.enter("forward", now, None if self.drew else "data")
        self.windows.roots_seen = True
        micro = self.windows.micro
        if micro is None or micro.backwards:
            micro = self.windows.micro = MicroBatch()
        if not micro.backwards:
            # Of several forwards before the backward the last one counts.
            micro.samples, micro.tokens = sizes

    def backward_begins(self, tensors: Any) -> None:
        """An outermost backward starts."""
        self.updating = None
        self.begun = True
        if self.ended_at is not None or self.forward is not None:
            self.settle()
        windows, phases = self.windows, self.phases
        if windows.roots_seen:
            phases.enter("backward", _clock())
            micro = windows.backward_begins()
        else:
            # Without a root, what came after the data (or the last step) was the forward.
            if phases.pending_data:
                phases.settle_data("data")
            phases.enter("backward", _clock(), gap_is="forward")
            micro = windows.backward_begins()
            if micro.samples is None:
                micro.samples, micro.tokens = sizes_of(self._batch)
                self._batch = None
        if self.device is None:
            first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            self.device = getattr(first, "device", None)
        self.losses.hear(tensors, micro, self.tracks.leader, first=not windows.unstepped)
        if self.hears_losses is not None:
            self.hears_losses(tensors, micro)

    def settle(self) -> None:
        """Work through what hooks only noted: the end of a backward, then a forward's begin."""
        ended_at, self.ended_at = self.ended_at, None
        if ended_at is not None:
            self.windows.backward_ends(self.ended_well)
            self.phases.enter("other", ended_at)
            self.drew = False
        forward, self.forward = self.forward, None
        if forward is not None:
            self.forward_begins(*forward)

    def backward_ends(self, completed: bool) -> None:
        """The outermost backward returned, or raised; where that cannot wait for the next hook."""
        self.windows.backward_ends(completed)
        self.phases.enter("optimizer" if self.windows.stepping else "other", _clock())
        self.drew = False

    def optimizer_cleared(self, optimizer: Any) -> None:
        """`zero_grad` of an optimizer returned."""
        self.settle()
        self.windows.optimizer_cleared(optimizer)

    def probes(self) -> Before:
        """What `module_cleared` is to compare with; `zero_grad` of a module begins."""
        self.settle()
        return self.windows.probes()

    def _discarded(self, track: OptimizerTrack, lost: int) -> None:
        index = track.index or 0
        if self.discards is not None:
            self.discards(index, lost)
        self._say(WindowDiscarded(optimizer=index, micro_batches=lost, after_step=self.steps))

    # --- scaler ---------------------------------------------------------------------------

    def scale_reading(self) -> Reading:
        """The loss scale now; None without a scaler or before its first use."""
        scale = None if self.scaler is None else self.scaler._scale
        if scale is None:
            return None
        identity, version, reading = self._scale_known
        if identity != id(scale) or version != scale._version:
            reading = self.reader.read(scale)
            self._scale_known = (id(scale), scale._version, reading)
        return reading

    def window_scale(self) -> Reading:
        """The loss scale of the window whose gradients are whole; None where nothing scales."""
        if self.steered_scale is not None:
            return self.steered_scale[0]
        return self.scale_reading() if self.scaled else None

    def step_left(self, stepping: int) -> None:
        """An optimizer's step was left, `stepping` others still run around it."""
        self.windows.stepping = stepping
        if not stepping:
            for track in self.tracks.live:
                track.depth = 0

    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.step` was entered."""
        if not scaler._enabled:
            return
        self.scaler = scaler
        self.scaled = True
        self.in_scaler_step = self.tracks.of(optimizer)

    def scaler_step_ends(self, scaler: Any, optimizer: Any, completed: bool) -> None:
        """`GradScaler.step` returned: if the optimizer's step did not run, that is a skip."""
        track, self.in_scaler_step = self.in_scaler_step, None
        draft, self._stepped_in_scaler = self._stepped_in_scaler, None
        if track is None or not (completed or draft):
            return
        if draft is None:
            draft = self._conclude(track, optimizer)
            if getattr(type(optimizer).step, "mpwatch_sees", False):
                draft.skipped_by_scaler = True
            else:
                # A class hooked before we came: what its step did shows in what the scaler found.
                draft.found_inf = found_inf_of(scaler, optimizer, self.reader)
        draft.checked = True
        self._wait_for_update(track, draft)

    def scaler_updated(self) -> None:
        """`GradScaler.update` returned: the steps before it are over."""
        self.scaled = self.still_scaled = False
        self._updates_come = True
        self._finish_pending(self.scale_reading())

    def _finish_pending(self, scale_after: Reading) -> None:
        pending, self.pending = self.pending, {}
        for draft in pending.values():
            draft.scale_after = scale_after
            self._finish(draft)

    def _wait_for_update(self, track: OptimizerTrack, draft: StepDraft) -> None:
        earlier = self.pending.pop(track.serial, None)
        if earlier is not None:
            # Two steps and no update between: this script never calls it.
            self._updates_come = False
            self._finish(earlier)
        if self._updates_come:
            self.pending[track.serial] = draft
        else:
            self._finish(draft)

    # --- step -----------------------------------------------------------------------------

    def before_update(self, track: OptimizerTrack, optimizer: Any) -> None:
        """The first of unscale, clip and step: gradients are whole and not yet changed."""
        self.settle()
        track.whole = True
        self.updating = optimizer if self.lazy else None
        if self.phases.phase != "optimizer" and not self.windows.in_backward:
            self.phases.enter("optimizer", _clock())
        self.sampling.before_update(self, track, optimizer)

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer's `step` was entered; of nested ones the outermost counts."""
        track = self.tracks.of(optimizer)
        # A copied optimizer was never made before our eyes; now there are two.
        self.lazy = self.lazy and len(self.tracks.live) == 1
        track.depth += 1
        self.windows.stepping += 1
        if track.depth == 1 and self.windows.in_backward and self.windows.micro is not None:
            track.add(self.windows.micro)

    def step_ends(self, optimizer: Any, completed: bool) -> None:
        """An optimizer's `step` returned: applied, unless a fused kernel found an overflow."""
        track = self.tracks.of(optimizer)
        track.depth = max(0, track.depth - 1)
        self.windows.stepping = max(0, self.windows.stepping - 1)
        if track.depth or not completed:
            return
        draft = self._conclude(track, optimizer)
        if self.step_skipped:
            draft.skipped_by_scaler, self.step_skipped = True, False
        if self.in_scaler_step is track and getattr(optimizer, "_step_supports_amp_scaling", False):
            draft.found_inf = self.reader.read(getattr(optimizer, "found_inf", None))
        if self.in_scaler_step is track:
            self._stepped_in_scaler = draft
        elif self.scaled:
            self._wait_for_update(track, draft)
        else:
            self._finish(draft)

    def _conclude(self, track: OptimizerTrack, optimizer: Any) -> StepDraft:
        """End the window of `track`; its draft still lacks what comes after the step."""
        index = self.tracks.number(track)
        script_windows = track.script_windows + 1
        window = self.windows.take(track)
        track.steps += 1
        before = self.steps_before if track is self.tracks.leader else 0
        draft = StepDraft(track.steps + before, index, window, track.usual_window)
        draft.multiplier = script_windows
        if window and window[0].divisor is not None:
            track.divisor = window[0].divisor
        draft.divisor, draft.loss_factor = track.divisor, self.losses.take_factor()
        draft.scale_before = self.window_scale()
        draft.checked, draft.nonfinite = self.looked_at_gradients, self.nonfinite
        if self.steered_scale is not None:
            draft.scale_after = self.steered_scale[1]
        draft.learning_rates = learning_rates(optimizer)
        track.whole, self.updating = False, None
        self.losses.forget()
        self.sampling.after_update(self, track, draft)
        if track is self.tracks.leader:
            self._round = self._since_leader if track.steps > 1 else None
            self._since_leader = set()
        else:
            self._since_leader.add(track.serial)
        if self.concluded is not None:
            self.concluded(track, optimizer, draft)
        return draft

    def swallowed(self, track: OptimizerTrack) -> None:
        """The step of a script window was swallowed: its micro-batches wait for the real one."""
        self.settle()
        self.windows.bank(track)
        self.updating = None
        self.losses.forget()
        if self.phases.phase != "other":
            self.phases.enter("other", _clock())

    def _finish(self, draft: StepDraft) -> None:
        now = _clock()
        if draft.optimizer == 0:
            draft.duration_s, draft.phase_s = self.phases.take(now)
        elif self.phases.phase == "optimizer":
            self.phases.enter("other", now)
        if self.windows.in_backward:
            self.phases.enter("backward", now)
        draft.mark = self.reader.mark()
        draft.time = time.time()
        if draft.optimizer < MAX_REPORTED_OPTIMIZERS:
            self._finished(draft)

    def end(self) -> int:
        """The loop is over: finish what waits; how many optimizers have gradients left unused."""
        self.settle()
        self._finish_pending(None)
        return sum(any(not micro.consumed for micro in track.window) for track in self.tracks.live)


# Called from a wrapper outside the shield, where Dynamo would take it for the script's.
invisible_to_dynamo(Loop.step_left)
