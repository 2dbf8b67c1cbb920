"""Another policy for the script's own GradScaler, which goes on scaling, checking and skipping.

After each of its updates the scale and its growth counter are set to what our policy says, so its
`get_scale()` and `state_dict()` stay true. Should this part fail, torch's own rules are in force
again from the scale that stands.
"""

import math
import weakref
from typing import TYPE_CHECKING, Any

from mpwatch.events import ScalerRefused, ScalerReplaced
from mpwatch.vocabulary import clean_text
from mpwatch_agent.gradient_scaling import gradients_of, largest
from mpwatch_agent.scale_reports import ScaleReports
from mpwatch_agent.scaler_presets import HIGHEST, LOWEST, Policy
from mpwatch_agent.scaling import LossScaler
from mpwatch_agent.steering import Part

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


class _Taken:
    """One GradScaler whose policy is ours now."""

    def __init__(self, agent: "Agent", scaler: Any, policy: Policy) -> None:
        self.ref = weakref.ref(scaler)
        self.scaler = LossScaler(policy)
        self.reports = ScaleReports(agent, self.scaler)


class ReplacedScaler(Part):
    """The policy of every enabled GradScaler that the script uses."""

    order = 1

    def __init__(self, agent: "Agent", policy: Policy) -> None:
        self._agent = agent
        self._loop = agent.loop
        self._policy = policy
        self._taken: list[_Taken] = []
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._on = True
        self._peak: float | None = None
        self._sizes: tuple[int, int | None] = (1, None)
        # What the update in progress is to do: whose it is, and whether gradients overflowed.
        self._updating: tuple[_Taken, bool] | None = None

    # --- taking over --------------------------------------------------------------------------

    def scale_begins(self, scaler: Any) -> None:
        if self._on:
            self._of(scaler)

    def _of(self, scaler: Any) -> _Taken:
        for taken in self._taken:
            if taken.ref() is scaler:
                return taken
        self._taken = [taken for taken in self._taken if taken.ref() is not None]
        taken = _Taken(self._agent, scaler, self._policy)
        self._taken.append(taken)
        note = ""
        if scaler in self._loaded or scaler._scale is not None:
            note = "goes on from the scale that the script's scaler has"
            # Clean windows count where a state was loaded; those before a change of rules do not.
            self._adopt(taken, scaler, counts=scaler in self._loaded)
        else:
            # Not used yet: torch makes its tensor of this when the first loss comes.
            scaler._init_scale = taken.scaler.scale
        self.say(taken, type(scaler).__name__, note)
        return taken

    def say(self, taken: "_Taken", replaced: str, note: str = "") -> None:
        """Tell which policy is in force now."""
        event = replaced_event(taken.scaler, replaced, self._loop.steps, note)
        self._agent.tell_at_once(event)
        if event.expected_skip_rate is not None and event.expected_skip_rate > 0.01:
            self._agent.say(
                f"scaler {event.policy}: once the scale has come to rest about"
                f" {event.expected_skip_rate:.0%} of steps will be skipped, unless its ceiling is"
                " below what gradients allow (an estimate)"
            )

    def scaler_loaded(self, scaler: Any) -> None:
        self._loaded.add(scaler)
        for taken in self._taken:
            if taken.ref() is scaler:
                self._adopt(taken, scaler)

    def _adopt(self, taken: _Taken, scaler: Any, *, counts: bool = True) -> None:
        scale = scaler.get_scale()
        if not math.isfinite(scale):
            scale = self._policy.init_scale
        clean = scaler._get_growth_tracker() if counts else 0
        taken.scaler.adopt(min(max(scale, LOWEST), HIGHEST), clean)
        self._write(taken, scaler)

    def _write(self, taken: _Taken, scaler: Any) -> None:
        if scaler._scale is None:
            scaler._init_scale = taken.scaler.scale
        else:
            scaler._scale.fill_(taken.scaler.scale)
            scaler._growth_tracker.fill_(taken.scaler.clean_windows)

    # --- windows ------------------------------------------------------------------------------

    def gradients_whole(self, optimizer: Any) -> None:
        loop = self._loop
        if not self._on or not loop.scaled:
            return
        window = loop.tracks.of(optimizer).window
        samples = [micro.samples for micro in window]
        self._sizes = (
            max(1, len(window)),
            None if None in samples else sum(count or 0 for count in samples),
        )
        if self._policy.guided:
            peak = largest(gradients_of([optimizer]))
            if peak is not None:
                self._peak = max(peak, self._peak or 0.0)

    def update_begins(self, scaler: Any, new_scale: Any) -> None:
        self._updating = None
        if not self._on or not scaler._enabled or scaler._scale is None or new_scale is not None:
            return
        taken = self._of(scaler)
        if scaler._scale.item() != taken.scaler.scale:
            # The script wrote into it.
            self._adopt(taken, scaler)
        flags = [
            flag
            for state in scaler._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if flags:
            self._updating = (taken, any(flag.item() for flag in flags))

    def update_ended(self, scaler: Any, new_scale: Any) -> None:
        updating, self._updating = self._updating, None
        peak, self._peak = self._peak, None
        if not self._on or not scaler._enabled or scaler._scale is None:
            return
        if updating is None:
            if new_scale is not None:
                self._adopt(self._of(scaler), scaler)
            return
        taken, overflowed = updating
        micro_batches, samples = self._sizes
        update = taken.scaler.update(
            overflowed,
            micro_batches=micro_batches,
            samples=samples,
            peak=None if overflowed or peak is None else peak / taken.scaler.scale,
        )
        self._write(taken, scaler)
        taken.reports.decided(update)

    # --- changes by command -------------------------------------------------------------------

    def set_scale(self, scale: float) -> bool:
        """Set every scale; whether there is any."""
        live = [(taken, taken.ref()) for taken in self._taken if taken.ref() is not None]
        for taken, scaler in live:
            taken.scaler.adopt(scale, hold=True)
            self._write(taken, scaler)
        return bool(live)

    def follow(self, policy: Policy) -> bool:
        """Another policy from now on; whether any scaler is there to follow it."""
        before, self._policy = self._policy, policy
        live = [(taken, taken.ref()) for taken in self._taken if taken.ref() is not None]
        for taken, scaler in live:
            taken.scaler.follow_policy(policy)
            self._write(taken, scaler)
            self.say(taken, before.name)
        return bool(live)

    # --- the end of it ------------------------------------------------------------------------

    def loop_known(self) -> None:
        if self._on and not self._taken and not self._scaled_by_us():
            self._refuse(
                "this script has no GradScaler of its own; with --precision O1:fp16 it gets one"
            )

    def _scaled_by_us(self) -> bool:
        # A precision mode has used the scaler, or has said itself why not.
        return any(type(part).__name__ == "Precision" for part in self._agent.steering.parts)

    def _refuse(self, reason: str) -> None:
        self._on = False
        reason = clean_text(reason, 300)
        self._agent.say(f"scaler {self._policy.name} is not used: {reason}")
        self._agent.tell_at_once(
            ScalerRefused(policy=self._policy.name, reason=reason, after_step=self._loop.steps)
        )

    def abandon(self, reason: str) -> None:
        if self._on:
            self._refuse(f"given back to the script's own GradScaler: {reason}")


def replaced_event(scaler: LossScaler, replaced: str, steps: int, note: str = "") -> ScalerReplaced:
    """The event that says which policy is in force, with its knobs."""
    policy = scaler.policy
    knobs: dict[str, str | int | float | bool | None] = {
        "init_scale": policy.init_scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        "interval_unit": policy.interval_unit,
        "hysteresis": policy.hysteresis,
        "consecutive": policy.consecutive,
        "floor": policy.floor,
        "ceiling": policy.ceiling,
        "at_floor": policy.at_floor,
        "at_ceiling": policy.at_ceiling,
    }
    # A guided scale does not climb until it overflows, and other units need the window's size.
    countable = not policy.guided and policy.interval_unit == "windows"
    return ScalerReplaced(
        policy=policy.name,
        replaced=replaced,
        loss_scale=scaler.scale,
        after_step=steps,
        knobs=knobs,
        expected_skip_rate=policy.expected_skip_rate() if countable else None,
        notes=(note,) if note else (),
    )
