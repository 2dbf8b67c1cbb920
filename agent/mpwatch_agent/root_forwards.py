"""The forwards of roots in another precision: autocast around them, fp32 out of them.

Owns the hooks on roots, what is entered and what weights a root sees meanwhile. Whether the mode
applies at all is `precision`'s to decide; `refuse(reason)` tells it what a forward showed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpwatch_agent import casting, forward_hooks, half_copies

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class RootForwards:
    """All roots of the script, in one mode and one 16-bit format."""

    def __init__(self, agent: "Agent", mode: str, refuse: Callable[[str], None]) -> None:
        self._agent = agent
        self._mode = mode
        self._refuse = refuse
        self._device = "cpu"
        self._dtype = torch.bfloat16
        self._autocast: Any = None
        self._depth = 0
        self._entering = False
        self._foreign = ""
        self._off = False
        self._handles: list[Any] = []
        self._copies: list[half_copies.HalfCopies] = []
        self._converted: list[Any] = []
        # How many forwards ran in autocast; whether any hook is on a plain module.
        self.count = 0
        self.plain = False
        # Classes of outputs that hold tensors out of reach.
        self.left: set[str] = set()
        self._begins = agent.guard_steering("steering at a root's forward", self.begins)
        self._ends = agent.guard_steering("steering after a root's forward", self.ends)

    def hook(self, module: Any, dtype: str, device: str, within_call: bool) -> None:
        """From now on `module` runs in `dtype`, beginning with the call that is under way."""
        self._dtype, self._device = _DTYPES[dtype], device
        # A forward that is run again is to run as it did, and our own autocast begins later.
        self._agent.observing.locator.witness.steered = self._dtype
        if self._mode == "O2":
            self._copies.append(half_copies.HalfCopies(module, self._dtype))
        elif self._mode == "O3":
            half_copies.convert(module, self._dtype)
            self._converted.append(module)
        self._handles += forward_hooks.hook(module, self._agent.gate, self._begins, self._ends)
        if within_call:
            self.plain = True
            self.begins(module)

    # --- one forward ------------------------------------------------------------------------

    def begins(self, module: Any) -> None:
        """A root's forward begins; of nested ones the outermost counts."""
        if self._off:
            return
        self._depth += 1
        if self._depth > 1:
            return
        if torch.is_autocast_enabled(self._device):
            self._depth = 0
            self._refuse("the script has autocast of its own")
            return
        autocast: Any = torch.autocast(self._device, self._dtype)
        self._entering = True
        try:
            autocast.__enter__()
        finally:
            self._entering = False
        self._autocast = autocast
        self.count += 1
        for copies in self._copies:
            copies.put_in()

    def ends(self, output: Any) -> Any:
        """It returned `output` (None after an exception): what the script gets instead."""
        if not self._depth:
            return None
        self._depth -= 1
        if self._depth:
            return None
        self.leave()
        if self._foreign:
            self._refuse(self._foreign)
        return casting.to_fp32(output, self.left)

    def leave(self) -> None:
        """Nothing of ours is entered, whatever was (a forward left by Ctrl+C, say)."""
        autocast, self._autocast = self._autocast, None
        self._depth = 0
        for copies in self._copies:
            copies.take_out()
        if autocast is not None:
            autocast.__exit__(None, None, None)

    def autocast_entered(self, autocast: Any) -> None:
        """`torch.autocast.__enter__` was called by somebody."""
        inside = self._autocast is not None and not self._entering
        if inside and autocast._enabled and autocast.device == self._device:
            self._foreign = "the script enters autocast of its own inside the model's forward"

    def move_gradients(self) -> None:
        """A backward ended: gradients of 16-bit copies go to the script's own weights."""
        for copies in self._copies:
            copies.move_gradients()

    # --- the end of it ------------------------------------------------------------------------

    def release(self) -> None:
        """Roots run as the script has them again."""
        self._off = True
        self._agent.observing.locator.witness.steered = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.leave()
        converted, self._converted = self._converted, []
        if converted:
            tracks = (track.ref() for track in self._agent.loop.tracks.live)
            half_copies.convert_back(converted, [o for o in tracks if o is not None])
