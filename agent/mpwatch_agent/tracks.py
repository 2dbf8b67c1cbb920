"""What is remembered per optimizer: its window of micro-batches, its steps, its probes.

An optimizer is looked up by identity and held weakly: a copy or a dead one is never mistaken for
it. Probes are a few of its parameters whose gradients tell, in a fraction of a microsecond,
whether a backward reached this optimizer and whether its gradients were cleared.
"""

import threading
import weakref
from typing import Any

from mpwatch_agent.device import Reading, settle

PROBES = 4


class MicroBatch:
    """One training forward and the backwards that belong to it.

    `losses` are readings of what was passed to backward, unscaled; `divisor` is the number that
    the script divided its loss by, where the graph shows one.
    """

    __slots__ = (
        "backwards",
        "consumed",
        "divisor",
        "flags",
        "losses",
        "samples",
        "targets",
        "tokens",
    )

    def __init__(self) -> None:
        self.losses: list[Reading] = []
        # None is "not seen"; only the first micro-batch of a window is looked at.
        self.divisor: float | None = None
        self.samples: int | None = None
        self.tokens: int | None = None
        # Over how many targets its loss is a mean, where the graph shows it.
        self.targets: float | None = None
        self.backwards = 0
        self.consumed = False
        # By an optimizer's serial number: a device's number that is finite if gradients were.
        self.flags: dict[int, Any] = {}

    def loss(self) -> float | None:
        """The sum of what was passed to backward; None where any part of it is unknown."""
        values = [settle(reading) for reading in self.losses]
        if not values or None in values:
            return None
        return sum(value for value in values if value is not None)


Probe = tuple[int, int] | None


class OptimizerTrack:
    """One optimizer's place in the loop. `index` is its order of first step, None before it."""

    def __init__(self, optimizer: Any, serial: int) -> None:
        self.ref = weakref.ref(optimizer)
        self.serial = serial
        self.thread = threading.get_ident()
        self.index: int | None = None
        self.name = type(optimizer).__name__
        self.window: list[MicroBatch] = []
        self.last_micro: MicroBatch | None = None
        self.steps = 0
        self.depth = 0
        # Its window's gradients are whole: unscale, clip or step has begun.
        self.whole = False
        self.usual_window = 0
        # How many micro-batches at the window's beginning belong to script windows whose step was
        # swallowed: their gradients are kept, whatever the script clears.
        self.banked = 0
        # Script windows in the window that is being gathered, and how many it is to have.
        self.script_windows = 0
        self.multiplier = 1
        # The divisor seen last in this optimizer's losses.
        self.divisor: float | None = None
        self._last_window = 0
        # Weak: whoever drops a model gets its memory back.
        self._probed = [weakref.ref(p) for p in _spread(_trainable(optimizer))]

    def takes_over(self, dead: "OptimizerTrack") -> bool:
        """Whether this optimizer has a parameter that the dead one had as well."""
        optimizer = self.ref()
        theirs = [reference() for reference in dead._probed]
        return optimizer is not None and any(
            mine is other for mine in _trainable(optimizer) for other in theirs
        )

    def probe(self) -> list[Probe]:
        """(identity, version) of each probed gradient, None where there is none."""
        states: list[Probe] = []
        for reference in self._probed:
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            states.append(None if gradient is None else (id(gradient), gradient._version))
        return states

    def probed(self) -> list[Any]:
        """The probed parameters that still live."""
        found = []
        for reference in self._probed:
            parameter = reference()
            if parameter is not None:
                found.append(parameter)
        return found

    def is_cleared(self) -> bool:
        """Whether the probed gradients are gone (`p.grad = None`, a `zero_grad` unseen)."""
        probed = (reference() for reference in self._probed)
        return all(parameter is None or parameter.grad is None for parameter in probed)

    def add(self, micro: MicroBatch) -> None:
        """The gradients of `micro` are (partly) this optimizer's."""
        if self.last_micro is not micro:
            self.window.append(micro)
            self.last_micro = micro
            self.whole = False

    @property
    def has_open(self) -> bool:
        """Whether a backward has reached this optimizer since its last step, swallowed or not."""
        return len(self.window) > self.banked

    @property
    def has_fresh(self) -> bool:
        """As `has_open`, of a micro-batch that no step of any optimizer has used yet."""
        return any(not micro.consumed for micro in self.window[self.banked :])

    def take_window(self) -> list[MicroBatch]:
        """End the window at a step."""
        self.bank()
        window, self.window = self.window, []
        self.banked = self.script_windows = 0
        return window

    def bank(self) -> None:
        """A script window is over, whether or not its step was swallowed."""
        size = len(self.window) - self.banked
        for micro in self.window[self.banked :]:
            micro.consumed = True
        if self.usual_window == 0 or size == self._last_window:
            self.usual_window = size
        self._last_window = size
        self.banked = len(self.window)
        self.script_windows += 1
        self.whole = False

    def is_even(self, size: int) -> bool:
        """Whether the window before last, the last one of `size` and the usual one are alike."""
        return size == self.usual_window == self._last_window

    def discard_window(self) -> int:
        """The gradients were cleared without a step: how many micro-batches that nobody used."""
        lost = sum(not micro.consumed for micro in self.window[self.banked :])
        del self.window[self.banked :]
        return lost


def _trainable(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _spread(parameters: list[Any]) -> list[Any]:
    if len(parameters) <= PROBES:
        return parameters
    last = len(parameters) - 1
    return [parameters[index * last // (PROBES - 1)] for index in range(PROBES)]


class Tracks:
    """All optimizers of the script that were made or have stepped; `live` in order of creation."""

    def __init__(self) -> None:
        self.live: list[OptimizerTrack] = []
        self.leader: OptimizerTrack | None = None
        self._by_id: dict[int, OptimizerTrack] = {}
        self._made = 0
        self._stepped = 0

    def of(self, optimizer: Any) -> OptimizerTrack:
        """The track of `optimizer`, made on first sight (a copied optimizer never ran __init__)."""
        track = self._by_id.get(id(optimizer))
        if track is None or track.ref() is not optimizer:
            track = OptimizerTrack(optimizer, self._made)
            self._made += 1
            self._by_id[id(optimizer)] = track
            self.forget_dead()
        return track

    def forget_dead(self) -> None:
        """Keep those whose optimizer lives."""
        self._by_id = {k: t for k, t in self._by_id.items() if t.ref() is not None}
        self.live = list(self._by_id.values())

    def forget_other_threads(self) -> None:
        """Keep what this thread or the main one made.

        Looking at gradients that another thread's backward is writing would end the process.
        """
        mine = (threading.get_ident(), threading.main_thread().ident)
        self._by_id = {k: t for k, t in self._by_id.items() if t.thread in mine}
        self.live = list(self._by_id.values())

    def number(self, track: OptimizerTrack) -> int:
        """Give `track` its index at its first step; the first of all leads."""
        leader = self.leader
        dead = leader is not None and leader.ref() is None
        if track.index is None and leader is not None and dead and track.takes_over(leader):
            # A new optimizer per epoch for the same model goes on where the dead one stopped.
            track.index, track.steps = 0, leader.steps
            self.leader = track
        if track.index is None:
            track.index = self._stepped
            self._stepped += 1
            if self.leader is None:
                self.leader = track
        return track.index
