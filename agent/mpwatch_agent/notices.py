"""What accumulation does exactly as asked and a person should know all the same; each said once.

Looks, never touches; called by `accumulation` at a backward and where an update begins.
"""

from collections.abc import Callable

from mpwatch_agent.loop import Loop
from mpwatch_agent.open_window import OpenWindow
from mpwatch_agent.tracks import Probe

# In so many backwards it is looked whether the script changes gradients before it steps.
EDITS_LOOKED_FOR = 64


class Notices:
    """`say(name, evidence, advice)` is told; None as long as nobody listens."""

    def __init__(self, loop: Loop) -> None:
        self.say: Callable[[str, str, str], None] | None = None
        self._loop = loop
        self._backwards = 0
        # Probes of each optimizer's gradients when the newest backward ended.
        self._after: dict[int, list[Probe]] = {}
        # Whether backwards are still looked at.
        self.looks = True

    def seeded(self) -> None:
        """A backward is seeded: where a loss in fp16 is scaled, by hand it overflows earlier."""
        if not self._loop.losses.half:
            return
        if self.say is not None:
            self.say(
                "fp16_loss_under_scaler",
                "the loss is a float16 tensor and is scaled: (loss / K) by hand overflows at"
                " another scale than the seeds of mpwatch, so overflows may differ",
                "compute the loss in float32",
            )

    def backward_ended(self) -> None:
        """That backward has ended."""
        self._backwards += 1
        if self._backwards <= EDITS_LOOKED_FOR:
            self._after = {track.serial: track.probe() for track in self._loop.tracks.live}
        else:
            self._after, self.looks = {}, False

    def update_begins(self, window: OpenWindow) -> None:
        """The first of unscale, clip and step: are the gradients those of the backward?"""
        after = self._after.get(window.track.serial)
        if after is None or not window.backwards() or after == window.track.probe():
            return
        if self.say is not None:
            self.say(
                "gradients_edited",
                "gradients are changed between backward and step: under accumulation each window"
                " of the script is changed by itself, which is the same for linear changes only",
                "clip with torch.nn.utils.clip_grad_norm_, which mpwatch does once per update",
            )
