"""A step on its way to becoming an event: what was seen, some of it not yet arrived.

On a CPU every reading is a number at once; on CUDA a draft waits until its mark is done, one or
two steps later, and only then becomes a `StepFinished`.
"""

import math
from typing import Any

import torch

from mpwatch.events import PhaseMemory, StepFinished
from mpwatch_agent.device import Reader, Reading, settle
from mpwatch_agent.tracks import MicroBatch

# More losses than this are not sent one by one; the mean is over all of them.
MAX_LOSSES = 256


class StepDraft:
    """One step of one optimizer; the hooks fill it, `finish` makes the event of it."""

    def __init__(self, step: int, optimizer: int, window: list[MicroBatch], usual: int) -> None:
        self.step = step
        self.optimizer = optimizer
        self.window = window
        self.usual_window = usual
        self.multiplier = 1
        self.divisor: float | None = None
        # What the sum of the losses is to be multiplied by, where an `Accumulator` says so.
        self.loss_factor: float | None = None
        self.skipped_by_scaler = False
        # The sum of found_inf as a fused optimizer saw it; None where no scaler took part.
        self.found_inf: Reading = None
        self.checked = False
        # Gradients were not finite and the step was taken all the same.
        self.nonfinite = False
        self.scale_before: Reading = None
        self.scale_after: Reading = None
        self.grad_norm: Reading = None
        self.norm_is_scaled = False
        self.learning_rates: tuple[float, ...] = ()
        self.duration_s: float | None = None
        self.phase_s: dict[str, float] = {}
        self.memory: dict[str, PhaseMemory] | None = None
        self.agent_s = 0.0
        self.sampled_s = 0.0
        self.locate_us: float | None = None
        # What was found where gradients were not finite.
        self.located: Any = None
        self.mark: Any = None
        self.time = 0.0
        # Of a step that was only noted: its phases (`PhaseClock.follow`), its end, and how far
        # the learning rate's schedule was then.
        self.marks: list[Any] = []
        self.ended = 0.0
        self.schedule_steps: int | None = None

    def unusual(self) -> bool:
        """Whether somebody wants to hear of it at once, as far as is known without waiting."""
        found = self.found_inf
        return self.skipped_by_scaler or (isinstance(found, float) and found != 0.0)

    def ready(self) -> bool:
        """Whether every reading has arrived."""
        return self.mark is None or bool(self.mark.query())

    def finish(self) -> StepFinished:
        """The event of this step; only when `ready`."""
        found_inf = settle(self.found_inf)
        skipped = self.skipped_by_scaler or bool(found_inf)
        norm = self._true_norm()
        losses = [
            # In one go what nearly all are: one number that is there.
            loss[0] if len(loss := micro.losses) == 1 and type(loss[0]) is float else micro.loss()
            for micro in self.window
        ]
        divisor = self._divisor()
        return StepFinished(
            step=self.step,
            applied=not skipped,
            optimizer=self.optimizer,
            micro_batches=len(self.window),
            script_window=max(1, self.usual_window),
            multiplier=self.multiplier,
            overflow=_overflow(
                skipped or self.nonfinite or self.located is not None, self.checked, norm
            ),
            losses=tuple(losses[:MAX_LOSSES]),
            loss_divisor=divisor,
            loss=_mean(losses, divisor, self._factor()),
            loss_scale_before=settle(self.scale_before),
            loss_scale_after=settle(self.scale_after),
            grad_norm=norm,
            learning_rates=self.learning_rates,
            duration_s=self.duration_s,
            phase_s=self.phase_s,
            samples=_total([micro.samples for micro in self.window]),
            tokens=_total([micro.tokens for micro in self.window]),
            memory=self.memory,
            agent_s=self.agent_s,
            sampled_s=self.sampled_s,
            locate_us=self.locate_us,
        )

    def _factor(self) -> float | None:
        return None if self.loss_factor is None else self.loss_factor / max(1, self.multiplier)

    def _divisor(self) -> float | None:
        """The divisor in the script's losses, where it is the length of the window.

        Any other number in the last division (tokens, say) is part of the loss itself.
        """
        divisor = self.divisor
        lengths = (len(self.window), self.usual_window)
        return divisor if divisor in lengths and divisor != 1 else None

    def _true_norm(self) -> float | None:
        norm = settle(self.grad_norm)
        if norm is None or not self.norm_is_scaled:
            return norm
        scale = settle(self.scale_before)
        return norm / scale if scale else None


def _overflow(skipped: bool, checked: bool, norm: float | None) -> bool | None:
    if skipped:
        return True
    if norm is not None and not math.isfinite(norm):
        return True
    # Nothing looked at every gradient: not known, rather than "no".
    return False if checked or norm is not None else None


def _mean(losses: list[float | None], divisor: float | None, factor: float | None) -> float | None:
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) != len(losses):
        return None
    return sum(known) * (factor if factor is not None else (divisor or 1.0) / len(known))


def _total(counts: list[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total if counts else None


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """The groups' learning rates, one number where they all agree."""
    groups = optimizer.param_groups
    if len(groups) == 1 and type(groups[0].get("lr")) is float:
        return (groups[0]["lr"],)
    rates = []
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            # A capturable optimizer's: on a device it would have to be waited for.
            rate = rate.item() if rate.device.type == "cpu" else None
        if rate is not None:
            rates.append(float(rate))
    return (rates[0],) if rates and all(r == rates[0] for r in rates) else tuple(rates)


def found_inf_of(scaler: Any, optimizer: Any, reader: Reader) -> Reading:
    """What an unscale has found in the gradients of `optimizer`, summed over devices."""
    found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return reader.read(sum(found[1:], found[0])) if found else None
