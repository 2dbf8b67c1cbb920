"""Names where gradients stopped being finite, at the first moment that shows it.

Looks while the gradients are as the backward left them: after unscale (Inf stays Inf) and before a
clip (which makes NaN of everything). On a CPU a number is there at once; elsewhere the skipped
step tells, which the scaler has waited for already. Costs nothing but a few reads until then.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.events import Event, OverflowLocated
from mpwatch_agent import verdicts
from mpwatch_agent.backward_order import BackwardOrder
from mpwatch_agent.device import Kept, at_once, settle
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.finiteness import count_non_finite, extremes_of, values_of
from mpwatch_agent.late_forward import LateForward
from mpwatch_agent.micro_flags import MicroFlags
from mpwatch_agent.naming import Named, Names
from mpwatch_agent.sampling import carries_scale
from mpwatch_agent.shield import Gate
from mpwatch_agent.tracks import MicroBatch, OptimizerTrack
from mpwatch_agent.window_history import WindowHistory, is_bad, is_late
from mpwatch_agent.witness import Witness

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.roots import Roots


@dataclass
class Located:
    """What was found of one overflow, before the step that it belongs to has its number."""

    fields: dict[str, Any]
    findings: verdicts.Findings


class Locator:
    """Overflows of one process. `flags` watches micro-batches, `witness` and `late` forwards."""

    def __init__(self, gate: Gate, loop: "Loop", roots: "Roots", mode: str = "auto") -> None:
        self._loop = loop
        self._roots = roots
        self.flags = MicroFlags(gate, mode)
        self.order = BackwardOrder()
        self.witness = Witness(gate)
        self.late = LateForward(gate, self.witness, mode == "full")
        self._history = WindowHistory(self.late.heard_late)
        # Holds the open window's inputs and writes them; only where that was asked for.
        self.keeper: Any = None
        # What running a forward again showed, by the identity of its micro-batch.
        self._forward: dict[int, verdicts.Findings] = {}
        self._pending: dict[int, Located] = {}
        # The scaler has looked at this window, on a CPU, and found nothing.
        self._looked = False
        # By an optimizer's serial number: what was not finite at its last step, and whether the
        # script left it there.
        self._last_hit: dict[int, tuple[int, str, weakref.ref[Any]]] = {}
        self._carried: dict[int, str] = {}
        self._clipped = False
        # Optimizers whose gradients were unscaled in this window.
        self._unscaled: set[int] = set()

    # --- moments ----------------------------------------------------------------------------

    def backward_begins(self, tensors: Any, micro: MicroBatch) -> None:
        """An outermost backward starts; the losses of `micro` are read."""
        scenes = self.witness.backward_begins()
        if type(self._loop.device) is torch.device:
            self.witness.device = self._loop.device.type
        if self._last_hit:
            self._look_for_leftovers()
        if self.order.learning:
            self.order.learn(tensors)
        if self.keeper is not None:
            self.keeper.hold(micro, scenes)
        if self.late.trace.on or self.witness.holds:
            self.late.backward_begins(micro, scenes)
        for loss in micro.losses:
            # A finite number minus itself is 0.0.
            if type(loss) is float and loss - loss != 0.0:
                self._forward[id(micro)] = self.witness.findings(scenes, self._loop.steps)
                break

    def _look_for_leftovers(self) -> None:
        """Before the first backward after an overflow: are its gradients still there?"""
        hits, self._last_hit = self._last_hit, {}
        for serial, (step, name, reference) in hits.items():
            parameter = reference()
            values = None if parameter is None else parameter.grad
            values = None if values is None else values_of(values)
            if values is not None and not extremes_of([values])[0].finite:
                self._carried[serial] = (
                    f"{name} was not finite any more after step {step}, and its gradient was not"
                    " cleared before the next backward"
                )

    def backward_ended(self, micro: MicroBatch) -> None:
        """A backward of `micro` has returned."""
        tracks = self._loop.tracks.live
        if len(tracks) == 1 and tracks[0].usual_window == 1:
            return
        self.flags.backward_ended(self._loop.tracks.live, micro, self._loop.steps + 1)

    def gradients_whole(self, track: OptimizerTrack, optimizer: Any, norm: Any) -> None:
        """A window is whole; `norm` is its sampled norm where there is one."""
        self._clipped = self._looked = False
        self._unscaled.discard(track.serial)
        if self._pending:
            # What a window that came to no step had shown is over with it.
            self._pending.pop(track.serial, None)
        if self._forward or (type(norm) is float and norm - norm != 0.0):
            self.locate(track, optimizer, track.window)
            self._forward.clear()
        elif self.late.trace.on and self.late.trace:
            # A few windows after an overflow: whether their losses are finite is worth a wait.
            self._loop.reader.wait()
            if any(is_bad(micro) for micro in track.window):
                self.locate(track, optimizer, track.window)

    def unscaled(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.unscale_` returned: what it found is known on a CPU."""
        track = self._loop.tracks.of(optimizer)
        self._unscaled.add(track.serial)
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            if not at_once(found):
                return
            if found.item():
                self.locate(track, optimizer, track.window)
                return
        self._looked = True

    def clip_ended(self, norm: Any) -> None:
        """A clip knows its norm; where this torch allows it, it has changed nothing yet."""
        if self._looked:
            return
        value = norm.take() if type(norm) is Kept else norm
        if type(value) is not float:
            self._clipped = True
            return
        if value - value == 0.0:
            return
        for track in self._loop.tracks.live:
            optimizer = track.ref()
            if track.whole and optimizer is not None:
                self.locate(track, optimizer, track.window)

    def is_plain(self) -> bool:
        """Whether a loss, a norm and a step that are as they should be are all it waits for."""
        return (
            self.keeper is None
            and not (self.late.busy or self.witness.holds or self.order.learning)
            and not (self._pending or self._forward or self._last_hit)
        )

    def goes_on(self, track: OptimizerTrack, unscaled: bool, clipped: bool) -> None:
        """An update has begun without a word to us, nothing in it was unusual so far."""
        self._looked, self._clipped = False, clipped
        if unscaled:
            self._unscaled.add(track.serial)
        else:
            self._unscaled.discard(track.serial)

    def step_noted(self, draft: StepDraft) -> None:
        """A step of the leader with finite losses was taken."""
        self._history.remember(draft, overflowed=False)

    def step_concluded(self, track: OptimizerTrack, draft: StepDraft) -> None:
        """The window of `track` has ended at a step: what was found belongs to it."""
        if self._pending:
            draft.located = self._pending.pop(track.serial, None)

    def step_over(self, draft: StepDraft) -> Event | None:
        """A step is over. Returns what is to be said of it, after the step itself."""
        track = next((t for t in self._loop.tracks.live if t.index == draft.optimizer), None)
        if draft.located is None and draft.unusual() and track is not None:
            # A fused optimizer, or a device: the skipped step is the first to tell.
            optimizer = track.ref()
            if optimizer is not None:
                self.locate(track, optimizer, draft.window, draft)
                draft.located = self._pending.pop(track.serial, None)
        located: Located | None = draft.located
        if draft.optimizer == 0:
            if self.keeper is not None:
                self.keeper.window_over()
            self.late.window_over()
            draft.locate_us = self.flags.window_over(len(draft.window))
            self._history.remember(draft, located is not None)
        if located is None:
            return None
        self.flags.arm(draft.step)
        verdict = verdicts.judge(located.findings)
        return OverflowLocated(
            step=draft.step,
            optimizer=draft.optimizer,
            verdict=verdict.verdict,
            evidence=verdict.evidence,
            **located.fields,
        )

    def has_bad_loss(self, draft: StepDraft) -> bool:
        """Whether a loss of this step was not finite; where not, the step is remembered."""
        if any(not is_late(micro) and is_bad(micro) for micro in draft.window):
            return True
        self._history.remember(draft, overflowed=False)
        return False

    # --- what is found ----------------------------------------------------------------------

    def locate(
        self,
        track: OptimizerTrack,
        optimizer: Any,
        window: list[MicroBatch],
        draft: StepDraft | None = None,
    ) -> Located | None:
        """Look at every gradient of `optimizer` now: which is not finite, and since when.

        For whoever finds an overflow by other means (a scaler of our own): call it before the
        gradients are changed. None where every gradient is finite. `draft`: its step is over.
        """
        if track.serial in self._pending:
            return self._pending[track.serial]
        entries = list(_entries(optimizer))
        extremes = extremes_of([values for *_, values in entries])
        hit = [index for index, found in enumerate(extremes) if not found.finite]
        finite = [found.magnitude for found in extremes if found.finite]
        if not hit:
            return None
        names = Names(self._roots.modules())
        first, order = self._first([entries[index] for index in hit], names)
        parameter, group, index, values = first
        named = names.of(parameter, group, index)
        step = self._loop.steps + 1
        answer = self.flags.first(track, window, step)
        micro = None if answer.micro_batch is None else window[answer.micro_batch]
        findings = self._forward_findings(window, step)
        self._add_numbers(findings, track, optimizer, finite, draft)
        findings.micro_loss = None if micro is None else micro.loss()
        findings.carried_over = self._carried.pop(track.serial, "")
        self._last_hit[track.serial] = (step, named.parameter, weakref.ref(parameter))
        fields = {
            "micro_batch": answer.micro_batch,
            "micro_batch_reason": answer.reason,
            "parameter": named.parameter,
            "module": findings.forward_where
            or (None if findings.bad_loss else named.module)
            or None,
            "nonfinite": None if self._clipped else _kind(values),
            "where": "forward" if findings.bad_loss else "backward",
            "loss_scale": findings.scale,
            "headroom_octaves": verdicts.headroom_octaves(findings.largest),
            "parameters_hit": len(hit),
            "parameters_looked_at": len(entries),
            "order": order,
        }
        if self.keeper is not None:
            kept = window[-1] if micro is None and window else micro
            fields["dumped"] = self.keeper.keep(kept, step, answer.micro_batch, findings.scale)
        located = self._pending[track.serial] = Located(fields, findings)
        return located

    def _first(self, hit: list["_Entry"], names: Names) -> tuple["_Entry", str]:
        """The first of `hit` in backward order, and how that order is known."""
        ranks = [self.order.rank(entry[0]) for entry in hit]
        known = [(rank, i) for i, rank in enumerate(ranks) if rank is not None]
        if len(known) == len(hit):
            return hit[min(known)[1]], "graph"
        places = [names.position(entry[0]) for entry in hit]
        registered = [(place, i) for i, place in enumerate(places) if place is not None]
        return hit[max(registered)[1] if registered else len(hit) - 1], "registration"

    def _forward_findings(self, window: list[MicroBatch], step: int) -> verdicts.Findings:
        """What is known of the forwards of `window`, if the loss of one was not finite."""
        self._loop.reader.wait()
        self._history.settle(wait=True)
        bad = next((micro for micro in window if is_bad(micro)), None)
        findings = self._forward.pop(id(bad), None)
        self._forward.clear()
        if bad is not None and findings is None and is_late(bad):
            findings = self.late.findings(bad, step, len(window))
        elif bad is None and any(micro.loss() is None for micro in window):
            findings = self.late.of_unread(window, step)
        findings = findings or verdicts.Findings()
        findings.bad_loss = findings.bad_loss or bad is not None
        return findings

    def _add_numbers(
        self,
        findings: verdicts.Findings,
        track: OptimizerTrack,
        optimizer: Any,
        finite: list[float],
        draft: StepDraft | None,
    ) -> None:
        if draft is None:
            scale = self._scale()
            # After unscale the scale is out of the gradients again.
            scaled = carries_scale(self._loop, optimizer)
        else:
            # The scaler has gone on: what it was is known.
            scale = settle(draft.scale_before)
            # A scale of ours is out of the gradients before the step, in any case.
            ours = self._loop.steered_scale is not None
            scaled = scale is not None and not ours and track.serial not in self._unscaled
        findings.scale = scale
        largest = max(finite, default=0.0)
        findings.largest = largest if scaled or scale is None else largest * scale
        findings.clean_windows = self._history.clean_at(scale)
        findings.losses = tuple(self._history.losses)

    def _scale(self) -> float | None:
        """The loss scale as a number; an overflow is rare enough to wait for it."""
        if self._loop.steered_scale is not None:
            return self._loop.steered_scale[0]
        if not self._loop.scaled or self._loop.scaler is None:
            return None
        scale = self._loop.scaler._scale
        return None if scale is None else float(scale.item())


_Entry = tuple[Any, int, int, torch.Tensor]


def _entries(optimizer: Any) -> Any:
    """(parameter, its group, its place in it, its gradient's values) of what can be read."""
    for group, settings in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(settings["params"]):
            values = None if parameter.grad is None else values_of(parameter.grad)
            if values is not None:
                yield parameter, group, index, values


def _kind(values: torch.Tensor) -> str:
    infinite, nan = count_non_finite(values)
    return "nan" if nan and not infinite else "inf"


__all__ = ["Located", "Locator", "Named"]
