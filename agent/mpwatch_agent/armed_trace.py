"""Watches the next few forwards of a root after a loss that was not finite and known too late.

Hooks on every module for the length of one forward; they keep the ends of inputs and outputs where
those are, and nothing is read until `read`. Draws no random number, changes no tensor.
"""

import contextlib
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mpwatch.vocabulary import clean_text
from mpwatch_agent.forward_trace import Birth, bad_weight, hookable, tensors_in
from mpwatch_agent.rerun import refusal_of_hooks
from mpwatch_agent.shield import Gate

# Forwards that are watched when armed: at least, at most (a window of that many micro-batches).
FORWARDS, FORWARDS_AT_MOST = 8, 64
# Armed for the first so many losses that are not finite, then at most once in so many steps.
ALWAYS, THEN_EVERY = 3, 20

Ends = torch.Tensor | None


class Seen(NamedTuple):
    """What watching a forward showed, as a `ForwardTrace` has it."""

    birth: Birth | None
    bad_input: str
    bad_output: bool


class _Call(NamedTuple):
    """One call of a module: (least, greatest) of its inputs and outputs, on their device."""

    name: str
    module: "weakref.ref[nn.Module]"
    before: Ends
    after: Ends
    is_root: bool


class _Hook:
    """On one module. Copies and pickles to something that does nothing."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self._act(module, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # `nullcontext().__exit__` takes anything and returns None, without mpwatch installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class ArmedTrace:
    """`left` forwards are still to be watched; 0 as long as nothing was wrong."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.left = 0
        # Armed, or something of the open window is kept.
        self.on = False
        self._arms = 0
        self._armed_at = 0
        self._handles: list[Any] = []
        self._open: list[tuple[int, Ends]] = []
        self._calls: list[_Call] = []
        self._kept: dict[int, tuple[Any, list[_Call]]] = {}

    def arm(self, step: int, window: int) -> bool:
        """Watch the next forwards; False where that was done often enough of late."""
        if self.left:
            return True
        if self._arms >= ALWAYS and step - self._armed_at < THEN_EVERY:
            return False
        self._arms += 1
        self._armed_at = step
        self.on = True
        self.left = min(FORWARDS_AT_MOST, max(FORWARDS, window))
        return True

    def disarm(self) -> None:
        """Something was named: no more forwards are watched."""
        self.left = 0

    # --- one forward ------------------------------------------------------------------------

    def forward_begins(self, root: nn.Module | None) -> None:
        """Put hooks on the modules of `root`, which is about to run."""
        self._remove()
        if root is None or not self.left or refusal_of_hooks(root, self._gate):
            return
        self.left -= 1
        for name, module in hookable(root):
            is_root = module is root
            label = clean_text(name, 200) or type(root).__name__
            before, after = _Hook(self._enters), _Hook(partial(self._leaves, label, is_root))
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=is_root),
            ]

    def _enters(self, module: nn.Module, arguments: Any, named: Any) -> None:
        # Before it runs, for it may change its input in place.
        if self._handles and not self._gate.elsewhere():
            self._open.append((id(module), self._ends((arguments, named))))

    def _leaves(
        self,
        name: str,
        is_root: bool,
        module: nn.Module,
        arguments: Any,
        named: Any,
        output: Any,
    ) -> None:
        # A root also by an exception: then `output` is None.
        if not self._handles or self._gate.elsewhere():
            return
        while self._open:
            # Calls that an exception left never come back.
            key, before = self._open.pop()
            if key == id(module):
                after = self._ends(output)
                if after is not None:
                    self._calls.append(_Call(name, weakref.ref(module), before, after, is_root))
                break
        if is_root:
            self._remove()

    def _ends(self, value: Any) -> Ends:
        """(least, greatest) over the tensors in `value`, NaN if there is one; waits for nothing."""
        try:
            with torch.no_grad():
                ends = [_pair(tensor) for tensor in tensors_in(value) if _is_plain(tensor)]
                if len(ends) < 2:
                    return ends[0] if ends else None
                both = torch.stack(ends)
                return torch.stack((both[:, 0].amin(), both[:, 1].amax()))
        except Exception:
            # Of several devices, of a format that has no order, or an object of the script's that
            # does not like to be looked at: this call tells nothing, and the forward goes on.
            return None

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    # --- its micro-batch --------------------------------------------------------------------

    def backward_begins(self, micro: Any) -> None:
        """What was seen since the last backward is of `micro`."""
        self._remove()
        if self._calls:
            self._kept[id(micro)] = micro, self._calls
            self._calls = []

    def __len__(self) -> int:
        return len(self._kept)

    def window_over(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self.on = bool(self.left)

    def read(self, micro: Any) -> Seen | None:
        """What the forwards of `micro` showed; None where they were not watched. Waits."""
        _, calls = self._kept.get(id(micro), (micro, []))
        if not calls:
            return None
        values = _values([ends for call in calls for ends in (call.before, call.after)])
        birth, bad_input, bad_output = None, "", False
        for call, before, after in zip(calls, values[::2], values[1::2], strict=True):
            entered, left = _kind(before), _kind(after)
            if birth is None and left and not entered:
                low, high = before or (None, None)
                module = call.module()
                weight = "" if module is None else bad_weight(module)
                birth = Birth(call.name, left, low, high, weight)
            if call.is_root:
                bad_output = bad_output or bool(left)
                if entered:
                    bad_input = f"the batch itself has {entered}"
        return Seen(birth, bad_input, bad_output)


def _is_plain(tensor: torch.Tensor) -> bool:
    # A subclass's reading may communicate.
    plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
    return (
        plain
        and tensor.layout is torch.strided
        and bool(tensor.numel())
        and tensor.dtype.is_floating_point
    )


def _pair(tensor: torch.Tensor) -> torch.Tensor:
    ends = torch.stack(torch.aminmax(tensor.detach()))
    return ends if ends.dtype is torch.float64 else ends.float()


def _values(ends: list[Ends]) -> list[tuple[float, float] | None]:
    """All of them on the host, with one read per device and format."""
    found: list[tuple[float, float] | None] = [None] * len(ends)
    groups: dict[Any, list[int]] = {}
    for index, each in enumerate(ends):
        if each is not None:
            groups.setdefault((each.device, each.dtype), []).append(index)
    for places in groups.values():
        rows = torch.stack([each for each in (ends[i] for i in places) if each is not None])
        for index, (low, high) in zip(places, rows.tolist(), strict=True):
            found[index] = low, high
    return found


def _kind(ends: tuple[float, float] | None) -> str:
    if ends is None or all(map(math.isfinite, ends)):
        return ""
    return "NaN" if any(map(math.isnan, ends)) else "Inf"
