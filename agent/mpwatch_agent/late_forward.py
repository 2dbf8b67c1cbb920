"""What is found out of a forward whose loss was known only after its backward: on a device.

By watching the forwards that follow (`armed_trace`), or, with `--locate full`, by running the one
that led to it again with its held inputs. Written for CUDA, unverified on a GPU. Called by
`locating`.
"""

from torch import nn

from mpwatch_agent.armed_trace import FORWARDS, ArmedTrace
from mpwatch_agent.held_inputs import HeldInputs
from mpwatch_agent.shield import Gate
from mpwatch_agent.tracks import MicroBatch
from mpwatch_agent.verdicts import Findings
from mpwatch_agent.window_history import is_late
from mpwatch_agent.witness import Scene, Witness, tell


class LateForward:
    """`hold`: keep the inputs of the open window (`--locate full`)."""

    def __init__(self, gate: Gate, witness: Witness, hold: bool) -> None:
        self.trace = ArmedTrace(gate)
        self._witness = witness
        witness.holds = hold
        self._held = HeldInputs()

    @property
    def busy(self) -> bool:
        """Whether something of the open window is kept."""
        return self.trace.on or bool(self._held)

    def forward_begins(self, root: nn.Module | None) -> None:
        """A training forward of a root begins."""
        self.trace.forward_begins(root)

    def backward_begins(self, micro: MicroBatch, scenes: list[Scene]) -> None:
        """The forwards of `micro` are over."""
        self.trace.backward_begins(micro)
        if self._witness.holds and is_late(micro):
            self._held.hold(micro, scenes)

    def window_over(self) -> None:
        """Let go of everything."""
        self.trace.window_over()
        self._held.window_over()

    def heard_late(self, step: int) -> None:
        """A loss of a step that is over was not finite, and nobody was there to look."""
        self.trace.arm(step, FORWARDS)

    def findings(self, micro: MicroBatch, step: int, window: int) -> Findings:
        """Of a `micro` whose loss was not finite."""
        found = self._watched(micro)
        if found is None:
            scenes = self._held.of(micro)
            if scenes:
                found = self._witness.findings(scenes, step)
            else:
                found = Findings(bad_loss=True, forward=self._unknown())
        if found.forward_where or found.bad_batch:
            self.trace.disarm()
        elif self.trace.arm(step, window):
            found.forward = f"{found.forward}; the next {self.trace.left} forwards are watched"
        return found

    def of_unread(self, window: list[MicroBatch], step: int) -> Findings | None:
        """Of a window with a loss that nobody could read: what watching its forwards showed."""
        for micro in window:
            found = self._watched(micro)
            if found is not None and (found.forward_where or found.bad_batch):
                self.trace.disarm()
                return found
        self.trace.arm(step, len(window))
        return None

    def _watched(self, micro: MicroBatch) -> Findings | None:
        seen = self.trace.read(micro)
        if seen is None:
            return None
        found = Findings(bad_loss=True)
        tell(found, seen, "the model's output was finite: the loss is made of it outside the model")
        return found

    def _unknown(self) -> str:
        if self._witness.holds:
            return (
                "the loss was not finite; its forward is not run again, for its inputs are not"
                " held: the window has more than 64 MB of them, or no forward of a root was seen"
            )
        return (
            "the loss was not finite, which is known on a device when its forward is over and not"
            " watched (--locate full holds the inputs)"
        )
