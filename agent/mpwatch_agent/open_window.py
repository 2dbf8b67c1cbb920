"""One optimizer's window of K script windows while it is being gathered: state and proof.

Nothing here decides; `accumulation` does, and asks here whether every gradient was counted once.
"""

import weakref
from typing import Any

import torch

from mpwatch_agent.stash import Stash
from mpwatch_agent.tracks import OptimizerTrack

Left = list[tuple[weakref.ref[torch.Tensor], int] | None]


class OpenWindow:
    """What is kept between the first backward of a real window and its step.

    `generations` are the numbers of the backwards after which script windows were swallowed: they
    grow, and there are K - 1 of them when the last script window ends.
    """

    __slots__ = (
        "cleared", "generations", "left", "merged", "scale", "stash", "swallows", "track",
        "unscaled", "unsure",
    )  # fmt: skip

    def __init__(self, track: OptimizerTrack) -> None:
        self.track = track
        self.stash = Stash()
        self.generations: list[int] = []
        # Whether this script window's step is swallowed; None until its update begins.
        self.swallows: bool | None = None
        # The sums are in the gradients.
        self.merged = False
        # The script has unscaled this script window, as far as it knows.
        self.unscaled = False
        # Sums and gradients are being changed: whoever comes by meanwhile comes from a failure.
        self.unsure = False
        # The script has cleared its gradients since the last swallowed step.
        self.cleared = False
        self.left: Left = []
        # The loss scale that the sums carry: (the scaler's tensor, its version, its value).
        self.scale: tuple[Any, int, torch.Tensor] | None = None

    def script_window_over(self) -> None:
        """The next script window begins: nothing is decided about it."""
        self.swallows = None
        self.merged = self.unscaled = False

    def banked(self, generation: int) -> None:
        """A script window was swallowed; remember how the script's gradients were left."""
        self.generations.append(generation)
        self.script_window_over()
        self.cleared = False
        self.left = []
        for parameter in self.track.probed():
            gradient = parameter.grad
            self.left.append(
                None if gradient is None else (weakref.ref(gradient), gradient._version)
            )

    def backwards(self) -> int:
        """Outermost backwards that reached this optimizer in its open script window."""
        track, count = self.track, 0
        for micro in track.window[track.banked :]:
            count += micro.backwards
        return count

    def never_cleared(self) -> bool:
        """Whether the gradients are those left at the last swallowed step, with more added."""
        backwards = self.backwards()
        if self.cleared or not self.left or not backwards:
            return False
        known = [
            (parameter.grad, left)
            for parameter, left in zip(self.track.probed(), self.left, strict=False)
            if left is not None
        ]
        return bool(known) and all(
            (then := kept()) is not None
            and gradient is then
            and then._version == version + backwards
            for gradient, (kept, version) in known
        )

    def flaw(self, k: int, generation: int) -> str | None:
        """What is wrong with the count of a window that is to be applied now, or None."""
        counted = self.generations
        if len(counted) != k - 1:
            return f"{len(counted) + 1} script windows were gathered instead of {k}"
        if any(a >= b for a, b in zip(counted, [*counted[1:], generation], strict=True)):
            return "a script window would be counted twice"
        if not self.stash.untouched():
            return "the kept gradients were changed"
        return None

    def give_up(self, k: int) -> str:
        """Prepare for being applied at the next step with K = 1; returns what was lost, in words.

        Sums become those of undivided gradients, as the gradients do, which is the caller's part.
        """
        lost = ""
        if not self.is_current() and not self.unsure:
            self._forget()  # its step is over; nobody came to say so
        elif self.unsure:
            lost = f"; {len(self.generations)} script windows before it were lost"
            self._forget()
        elif self.merged:
            self.stash.clear()  # it is in the gradients
        else:
            self.stash.scale(k)
        self.script_window_over()
        return lost

    def is_current(self) -> bool:
        """Whether what is kept here belongs to the window that the loop is in."""
        return len(self.generations) == self.track.script_windows

    def _forget(self) -> None:
        self.stash.clear()
        self.generations.clear()
        self.left = []
        self.unsure = False

    def follow_scale(self, scaler: Any) -> None:
        """Bring the sums to the loss scale that `scaler` has now."""
        tensor = None if scaler is None else scaler._scale
        if tensor is None:
            return
        known = self.scale
        if known is not None and (known[0] is not tensor or known[1] != tensor._version):
            self.stash.scale(tensor / known[2])
            known = None
        if known is None:
            self.scale = (tensor, tensor._version, tensor.clone())


def is_empty(gradients: list[torch.Tensor | None]) -> bool:
    """Whether every gradient is None or zero; waits for a device, so only for rare questions."""
    return all(g is None or not bool((g.detach() != 0).any()) for g in gradients)
