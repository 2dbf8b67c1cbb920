"""The loop while each step is like the one before it: hooks only note, and the rest waits.

A call of a Python function takes microseconds right after real work, and the ordinary moments
make a hundred per step. Here a moment is one function. Whatever is unusual `leave`s first; then
the ordinary moment follows as if there had been no notes.
"""

import time
from typing import Any

import torch

from mpwatch_agent.device import Reading, at_once
from mpwatch_agent.drafts import StepDraft, learning_rates
from mpwatch_agent.steady_notes import Notes
from mpwatch_agent.tracks import MicroBatch
from mpwatch_agent.windows import TOKENS, sizes_of

# What is noted between two steps; more of it is no training: data that are looked through.
MOST_MARKS = 10_000
_clock = time.perf_counter
_wall = time.time
_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing


class Steady(Notes):
    """The moments of a steady loop. Each returns whether it has noted what happened.

    Called by hooks on the loop's thread, only while `gate.steady`; lean, and unguarded but for
    themselves: a guard would be one more call.
    """

    # --- a micro-batch ----------------------------------------------------------------------

    def loader_begins(self) -> bool:
        """A DataLoader's `__next__` was entered."""
        start = _clock()
        try:
            windows = self._windows
            micro = windows.micro
            if windows.in_backward or (micro is not None and not micro.backwards):
                return self.leave()
            if len(self._marks) > MOST_MARKS or (not windows.unstepped and self.is_asked(start)):
                return self.leave()
            if self._edges is not None:
                self._edge("data")
            self._marks += ("data", start)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def loader_ends(self) -> None:
        """It returned, or raised."""
        if self._gate.steady:
            try:
                if self._edges is not None:
                    self._edge("drawn")
                self._marks += ("drawn", _clock())
            except BaseException as error:
                self._failed(error)

    def forward(self, root: Any, module: Any, arguments: Any, named: Any) -> bool:
        """A root's forward begins; `root` is a weak reference to it."""
        start = _clock()
        try:
            if root() is not module or _is_tracing():
                return False
            windows = self._windows
            if self.updating or windows.in_backward or len(self._marks) > MOST_MARKS:
                return self.leave()
            if not module.training or not _grad_enabled():
                if self._edges is not None:
                    self._edge("evaluation")
                self._marks += ("evaluation", start)
                return True
            micro = windows.micro
            if micro is None or micro.backwards:
                if not windows.unstepped and start >= self._look_at and self.is_asked(start):
                    return self.leave()
                micro = windows.micro = MicroBatch()
            first: Any = arguments[0] if arguments else None
            shape = first.shape if type(first) is torch.Tensor else None
            if not shape:
                micro.samples, micro.tokens = sizes_of(arguments or named)
            elif len(shape) == 2 and first.dtype in TOKENS:
                micro.samples, micro.tokens = shape[0], shape[0] * shape[1]
            else:
                micro.samples, micro.tokens = shape[0], None
            self._witness.forward_begins(root, arguments, named)
            if self._edges is not None:
                self._edge("forward")
            self._marks += ("forward", start)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def backward_begins(self, tensors: Any) -> bool:
        """An outermost backward was called with `tensors`."""
        start = _clock()
        try:
            windows, track, losses = self._windows, self._track, self._losses
            micro = windows.micro
            assert track is not None
            if (
                type(tensors) is not torch.Tensor
                or micro is None
                or micro.losses
                or self.updating
                or self.pending is not None
                or windows.stepping
                or len(track.window) >= self._usual
                or (track.window and not windows.clears_by_hook and track.is_cleared())
            ):
                return self._leaves(start)
            unscaled = losses.unscaled
            pair = unscaled.get(id(tensors)) if unscaled else None
            loss = tensors if pair is None else pair[1]
            value = self._reader.read(loss)
            # A finite number minus itself is 0.0.
            if value is None or (type(value) is float and value - value != 0.0):
                return self._leaves(start)
            if self._edges is not None:
                self._edge("backward")
            self._marks += ("backward", start)
            if unscaled:
                losses.half = losses.half or (pair is not None and loss.dtype is torch.float16)
                unscaled.clear()
            self._witness.scenes.clear()
            micro.losses.append(value)
            self._gate.own_s += _clock() - start
            # Last: an interrupted moment leaves nothing begun.
            windows.in_backward = True
            return True
        except BaseException as error:
            return self._failed(error)

    def backward_ended(self, completed: bool) -> bool:
        """That backward returned, or raised."""
        start = _clock()
        try:
            windows, track = self._windows, self._track
            micro = windows.micro
            if not self._gate.steady or not completed or micro is None or track is None:
                return self.leave()
            windows.in_backward = False
            micro.backwards = 1
            windows.unstepped += 1
            track.window.append(micro)
            track.last_micro = micro
            if self._edges is not None:
                self._edge("ended")
            self._marks += ("ended", start)
            if self._flagging:
                self._flags.backward_ended((track,), micro, self._loop.steps + 1)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    # --- an update --------------------------------------------------------------------------

    def unscale(self, scaler: Any, optimizer: Any) -> bool:
        """`unscale_` of an enabled scaler was entered."""
        start = _clock()
        try:
            if scaler is not self._scaler or self._unscaled or not self._is_whole(optimizer):
                return self.leave()
            self._unscaled = True
            self._loop.still_scaled = False
            if not self.updating:
                self._update_begins(start)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def unscaled(self, scaler: Any, optimizer: Any) -> bool:
        """That `unscale_` returned: whether it has found nothing, as far as is known by now."""
        if self._loop.in_scaler_step is not None or not self._gate.steady:
            # The scaler's own: what it found shows in whether it steps.
            return self._gate.steady
        start = _clock()
        try:
            # Before the script clips: that may leave no trace of what was not finite.
            state = scaler._per_optimizer_states[id(optimizer)]
            self._looked = True
            for found in state["found_inf_per_device"].values():
                if not at_once(found):
                    self._looked = False
                elif found.item():
                    return self.leave()
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def clip_begins(self) -> bool:
        """A norm is about to be taken for a clip, and no update has begun."""
        start = _clock()
        try:
            track = self._track
            if self._loop.still_scaled or track is None or not self._is_whole(track.ref()):
                return self.leave()
            self._agent.observing.windows.clip_begins()
            self._update_begins(start)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def values_clipped(self) -> bool:
        """Gradients are about to be clipped one by one."""
        if not self.updating:
            return self.clip_begins()
        try:
            self._agent.observing.windows.clip_begins()
            return True
        except BaseException as error:
            return self._failed(error)

    def clip_ended(self, norm: Any, norm_type: Any) -> bool:
        """The clip has its norm, and has changed nothing yet."""
        start = _clock()
        try:
            if not self._gate.steady or not self.updating:
                return self.leave()
            # One is enough to report, two to know that neither is the whole norm.
            if norm_type == 2 and len(self._clips) < 2:
                reader = self._reader
                # Where every gradient is known to be finite, the number can wait.
                value = reader.keep(norm) if self._looked else reader.read(norm)
                if value is None or (type(value) is float and value - value != 0.0):
                    return self.leave()
                self._clips.append((value, False))
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - start

    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> bool:
        """`step` of an enabled scaler was entered."""
        try:
            track = self._track
            if scaler is not self._scaler or track is None or track.ref() is not optimizer:
                return self.leave()
            if type(self._scale) is float and not self._scale_is(self._scale_version):
                return self.leave()
            self._loop.in_scaler_step = track
            return True
        except BaseException as error:
            return self._failed(error)

    def step_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """An optimizer's `step` was entered with `args`, itself among them."""
        start = _clock()
        try:
            loop, windows, track = self._loop, self._windows, self._track
            assert track is not None
            if (
                track.ref() is not args[0]
                or windows.stepping
                or self.pending is not None
                or (loop.in_scaler_step is None) is loop.scaled
                or not (self.updating or self._is_whole(args[0]))
                or ((len(args) > 1 or kwargs) and _has_closure(args, kwargs))
            ):
                return self._leaves(start)
            if not self.updating:
                self._update_begins(start)
            self._gate.own_s += _clock() - start
            # Last: an interrupted moment leaves nothing begun.
            track.depth = windows.stepping = 1
            return True
        except BaseException as error:
            return self._failed(error)

    def step_ended(self) -> bool:
        """It returned."""
        now = _clock()
        try:
            loop, windows, track = self._loop, self._windows, self._track
            if not self._gate.steady or track is None:
                return False
            optimizer = track.ref()
            found: Reading = None
            if self._fused and loop.scaled:
                found = self._reader.read(getattr(optimizer, "found_inf", None))
                if type(found) is float and found != 0.0:
                    return self.leave()
            losses, clips = self._losses, self._clips
            draft = StepDraft(loop.steps_before + track.steps + 1, 0, track.window, self._usual)
            draft.learning_rates = learning_rates(optimizer)
            draft.divisor, draft.loss_factor = track.divisor, losses.factor
            if len(clips) == 1 and self._sampling.clip_is_whole:
                draft.grad_norm, draft.norm_is_scaled = clips[0]
            if losses.unscaled:
                losses.unscaled.clear()
            if loop.scaled:
                draft.checked, draft.found_inf, draft.scale_before = True, found, self._scale
            draft.ended, draft.time = now, _wall()
            # No call until the step is told as well as counted: nothing interrupts these.
            track.depth = windows.stepping = windows.unstepped = 0
            track.window, windows.micro, losses.factor = [], None, None
            self._clips = [] if clips else clips
            self.updating = self._unscaled = self._looked = False
            track.steps += 1
            if loop.scaled:
                self.pending = draft
            else:
                draft.marks, self._marks = self._marks, []
                self._drafts += (draft,)
                self._finish(draft)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - now

    def updated(self, scaler: Any) -> bool:
        """`update` of an enabled scaler returned, without a scale given to it."""
        now = _clock()
        try:
            draft = self.pending
            if not self._gate.steady or draft is None or scaler is not self._scaler:
                return self.leave()
            if type(self._scale) is float:
                # In place, once per update: it grows when nobody is steady, and shrinks then too.
                if not self._scale_is(self._scale_version + 1):
                    return self.leave()
                self._scale_version += 1
            else:
                self._scale = self._loop.scale_reading()
            loop = self._loop
            draft.ended, draft.time, draft.scale_after = now, _wall(), self._scale
            loop.scaled = loop.still_scaled = False
            self.pending = None
            draft.marks, self._marks = self._marks, []
            self._drafts += (draft,)
            self._finish(draft)
            return True
        except BaseException as error:
            return self._failed(error)
        finally:
            self._gate.own_s += _clock() - now

    def _scale_is(self, version: int) -> bool:
        """Whether the scaler has the scale that is known, changed in place so often.

        And whether it will grow when that was foreseen: nobody else wrote its tracker or interval.
        """
        scaler, tensor = self._scaler, self._scale_tensor
        return (
            scaler._scale is tensor
            and bool(tensor._version == version)
            and bool(scaler._growth_tracker._version == self._tracker_version)
            and bool(scaler._growth_interval == self._interval)
        )

    def _leaves(self, start: float) -> bool:
        """Leave a moment that began at `start`."""
        self.leave()
        self._gate.own_s += _clock() - start
        return False

    def _is_whole(self, optimizer: Any) -> bool:
        """Whether a window of `optimizer` is as long as those before it, and nothing runs."""
        track = self._track
        return (
            track is not None
            and track.ref() is optimizer
            and len(track.window) == self._usual
            and not self._windows.in_backward
        )

    def _update_begins(self, now: float) -> None:
        self.updating = True
        if self._edges is not None:
            self._edge("optimizer")
        self._marks += ("optimizer", now)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step was called with more than its optimizer."""
    return any(each is not None for each in (*args[1:], *kwargs.values()))
