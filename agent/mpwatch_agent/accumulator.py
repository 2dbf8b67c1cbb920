"""Accumulation for loops that ask for it: micro-batches in, one update per window out.

The normalisation is deferred: each micro-batch adds its gradients times its weight, and what the
window turned out to hold divides them once, at the end. So unequal micro-batches, tokens and a
short last window come out as one big batch would. Puts no hook on; made by `Watch.accumulator`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from mpwatch_agent import gradient_sync
from mpwatch_agent.micro_splits import split
from mpwatch_agent.stash import parameters_of

_Batch = TypeVar("_Batch")
NORMALIZE = ("mean", "tokens", "sum")
PARTIAL = ("auto", "step", "carry", "drop")
ON_OVERFLOW = ("skip", "retry", "early-abort")
RETRIES_AT_MOST = 16
# From so many micro-batches on, half-precision sums lose what is added to them.
HALF_AT_MOST = 8


class Accumulator:
    """Gathers `window` micro-batches per update of `optimizer`.

    Args:
        window: micro-batches per update; may be set at any time and holds from the next window on.
        scaler, scheduler: stepped with each update, the scheduler only where it was applied.
        clip: largest norm of the gradients, clipped once per update, after unscaling.
        normalize: "mean" for losses that are means (`weight` samples or tokens each, equal if not
            given), "tokens" for losses that are sums over `weight` tokens, "sum" to divide nothing.
        partial: what becomes of a short last window: "step", "carry" it into the next loop, "drop"
            it, or "auto": step where at least half is there, else carry.
        on_overflow: "skip" the window, "retry" it at the lower scale, or "early-abort" it at the
            first micro-batch that is not finite.
        modules: wrappers that synchronise gradients, told before each forward.

    Raises:
        ValueError: a window below 1 or a word that is none of those above.
    """

    def __init__(
        self,
        optimizer: Any,
        window: int,
        *,
        scaler: Any = None,
        scheduler: Any = None,
        clip: float | None = None,
        normalize: str = "mean",
        partial: str = "auto",
        on_overflow: str = "skip",
        modules: tuple[Any, ...] = (),
    ) -> None:
        _one_of("normalize", normalize, NORMALIZE)
        _one_of("partial", partial, PARTIAL)
        _one_of("on_overflow", on_overflow, ON_OVERFLOW)
        self.optimizer = optimizer
        self.scaler = scaler
        self.scheduler = scheduler
        self.clip = clip
        self.modules = modules
        self.normalize, self.partial, self.on_overflow = normalize, partial, on_overflow
        self.window = self._target = window
        # How long the next window is, where that is known better: a batch that was split, a retry.
        self._planned: int | None = None
        # Of the window that is open: micro-batches, the sum of their weights, half-precision sums.
        self.micro_batches = 0
        self.weight = 0.0
        self._reference = 1.0
        self._sums: dict[int, torch.Tensor] = {}
        # Of all windows so far.
        self.updates = self.skipped = self.dropped = self.retried = 0
        # Of the newest window: whether it ended in the last `backward`, and without an update.
        self.stepped = self.step_was_skipped = False
        self._overflowed = False
        # Told what the sum of the window's losses is to be multiplied by, for who reports it.
        self.tells_worth: Callable[[float], None] | None = None
        # Told how many micro-batches the open window holds, for who reports a rest at the end.
        self.tells_open: Callable[[int], None] | None = None

    @property
    def window(self) -> int:
        """Micro-batches per update, from the next window on."""
        return self._window

    @window.setter
    def window(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"window is {value!r}; it must be a whole number of micro-batches")
        self._window = value

    # --- micro-batches ------------------------------------------------------------------------

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The micro-batches of `loader`; call `backward` for each. Ends with a partial window."""
        kept: list[_Batch] = []
        for batch in loader:
            yield from self._with_retries(batch, kept)
        self._end_of_data()

    def split(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """One window: `batch` (tensors, or containers of them) in `parts` along its first axis."""
        pieces = split(batch, parts or self._window)
        if self.micro_batches:
            self._target = self.micro_batches + len(pieces)
        else:
            self._planned = len(pieces)
        kept: list[Any] = []
        for piece in pieces:
            yield from self._with_retries(piece, kept)

    def _with_retries(self, batch: Any, kept: list[Any]) -> Iterator[Any]:
        if not self.micro_batches:
            kept.clear()
        if self.on_overflow == "retry":
            kept.append(batch)
        queue, tries = [batch], 0
        while queue:
            target = self._target if self.micro_batches else (self._planned or self._window)
            last = self.micro_batches + 1 >= target
            gradient_sync.before_forward(self.modules, needed=last)
            yield queue.pop(0)
            if self._overflowed and self.on_overflow == "retry" and tries < RETRIES_AT_MOST:
                self._overflowed = False
                tries += 1
                self.retried += 1
                self._planned = len(kept)
                queue = [*kept]

    # --- backward -----------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> bool:
        """Add the gradients of one micro-batch; at the window's end, update.

        Args:
            loss: a scalar, normalised as `normalize` says.
            weight: how many samples or tokens it stands for.

        Returns:
            Whether the window is over.

        Raises:
            ValueError: "tokens" without a weight, or a weight that is negative.
        """
        if weight is None and self.normalize == "tokens":
            raise ValueError('normalize="tokens" needs the number of tokens as weight')
        if weight is not None and weight < 0:
            raise ValueError(f"weight is {weight}; it must not be negative")
        counted = 1.0 if weight is None else float(weight)
        if self.micro_batches == 0:
            self._target, self._planned = self._planned or self._window, None
            # A constant of about the right size: gradients and loss scale keep their magnitude.
            self._reference = (counted or 1.0) * self._target
        self.stepped = self._overflowed = False
        factor = 1.0 if self.normalize == "sum" else 1.0 / self._reference
        if self.normalize == "mean":
            factor *= counted
        scaled = loss * factor
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self._gather_halves()
        self.micro_batches += 1
        self.weight += counted
        if self.tells_open is not None:
            self.tells_open(self.micro_batches)
        if self.micro_batches >= self._target or self._aborts():
            self._update()
        return self.stepped

    def _aborts(self) -> bool:
        if self.on_overflow != "early-abort":
            return False
        finite = [torch.isfinite(p.grad).all() for p in self._parameters() if p.grad is not None]
        return bool(finite) and not bool(torch.stack(finite).all())

    def _parameters(self) -> list[Any]:
        return parameters_of(self.optimizer)

    # --- sums in single precision -------------------------------------------------------------

    @torch.no_grad()
    def _gather_halves(self) -> None:
        """Keep sums of half-precision gradients in fp32, where their own type would lose them."""
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is None or not self._loses(gradient.dtype):
                continue
            total = self._sums.get(id(parameter))
            if total is None:
                self._sums[id(parameter)] = gradient.float()
            else:
                total.add_(gradient)
            parameter.grad = None

    def _loses(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16 or (dtype is torch.float16 and self._target > HALF_AT_MOST)

    # --- update -------------------------------------------------------------------------------

    @torch.no_grad()
    def _normalise(self) -> None:
        """Divide by what the window turned out to hold."""
        factor = 1.0
        if self.normalize != "sum" and self.weight:
            factor = self._reference / self.weight
        if self.tells_worth is not None:
            self.tells_worth(factor)
        for parameter in self._parameters():
            total = self._sums.pop(id(parameter), None)
            if total is not None:
                parameter.grad = total.mul_(factor).to(parameter.dtype)
            elif parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

    def _update(self) -> None:
        """The window is over: one step, applied or skipped."""
        self._normalise()
        scaler, optimizer = self.scaler, self.optimizer
        if scaler is not None and scaler.is_enabled():
            scaler.unscale_(optimizer)
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            self._overflowed = any(bool(flag) for flag in found)
        if self.clip is not None and not self._overflowed:
            torch.nn.utils.clip_grad_norm_(self._parameters(), self.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self.step_was_skipped = self._overflowed
        self.skipped += self._overflowed
        self.updates += not self._overflowed
        if self.scheduler is not None and not self._overflowed:
            self.scheduler.step()
        self._close()
        self.stepped = True

    def _close(self) -> None:
        self.optimizer.zero_grad()
        self._sums.clear()
        self.micro_batches, self.weight = 0, 0.0
        if self.tells_open is not None:
            self.tells_open(0)

    def _end_of_data(self) -> None:
        gathered = self.micro_batches
        if not gathered or self.partial == "carry":
            return
        enough = self.partial == "step" or 2 * gathered >= self._target
        if self.partial == "drop":
            self.dropped += gathered
            self._close()
        elif enough:
            self._update()

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. An open window is not in it: it is gathered again."""
        names = ("window", "updates", "skipped", "dropped", "retried")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, at the beginning of a window."""
        for name in ("window", "updates", "skipped", "dropped", "retried"):
            setattr(self, name, state[name])
        self._close()


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
