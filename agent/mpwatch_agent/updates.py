"""What happens between the last backward of a window and the end of its step.

Called by the hooks of optimizer, scaler and clipping (guarded there): tells faults, observing,
steering and the loop, in this order, that the gradients of a window are whole.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


class Updates:
    """The moments of an update, named like what the script calls."""

    def __init__(self, agent: "Agent") -> None:
        self._gate = agent.gate
        self._bind = agent.bind
        self._loop = agent.loop
        self._faults = agent.faults
        self._sampling = agent.sampling
        self._diagnoser = agent.observing.diagnoser
        self._whole: Callable[[Any], None] = agent.guard_steering(
            "steering at whole gradients", agent.steering.gradients_whole
        )

    def unscale_begins(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.unscale_` was called."""
        if scaler._enabled:
            self._diagnoser.unscale_begins(scaler, optimizer)
            self._before_update(optimizer)
            self._loop.still_scaled = False

    def scaler_step_begins(self, scaler: Any, optimizer: Any) -> None:
        """`GradScaler.step` was entered."""
        if scaler._enabled:
            self._diagnoser.scaler_step_begins(scaler, optimizer)
            self._before_update(optimizer)
        self._loop.scaler_step_begins(scaler, optimizer)

    def scaler_updated(self, scaler: Any) -> None:
        """`GradScaler.update` returned."""
        if scaler._enabled:
            self._diagnoser.scaler_updated()
            self._loop.scaler_updated()

    def clip_begins(self) -> None:
        """Gradients are about to be clipped; whose they are is not known."""
        if self._faults is not None:
            self._faults.before_update()
        if self._gate.steers:
            self._whole_at_clip()
        self._sampling.clip_begins(self._loop)

    def clip_ends(self, norm: Any, norm_type: Any) -> None:
        """The clip found `norm`."""
        self._sampling.clip_ends(self._loop, norm, norm_type)

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer's `step` was entered."""
        if not self._gate.bound:
            self._bind()
        self._before_update(optimizer)
        self._loop.step_begins(optimizer)

    def step_ends(self, optimizer: Any, completed: bool) -> None:
        """That step returned, or raised."""
        self._loop.step_ends(optimizer, completed)

    def _before_update(self, optimizer: Any) -> None:
        track = self._loop.tracks.of(optimizer)
        faults = self._faults if self._leads(optimizer) else None
        if faults is not None:
            faults.before_update()
        if not track.whole:
            if self._gate.steers:
                self._whole(optimizer)
            self._loop.before_update(track, optimizer)
        if faults is not None:
            faults.phase_begins("optimizer")

    def _leads(self, optimizer: Any) -> bool:
        leader = self._loop.tracks.leader
        return leader is None or leader.ref() is optimizer

    def _whole_at_clip(self) -> None:
        self._loop.settle()
        if self._loop.windows.banks and len(self._loop.tracks.live) > 1:
            # Whose window is over is not known before each one's own step.
            return
        for track in self._loop.tracks.live:
            optimizer = track.ref() if track.has_open and not track.whole else None
            if optimizer is not None:
                self._whole(optimizer)
