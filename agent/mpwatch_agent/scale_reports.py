"""What a loss scaler's decisions mean to a person: said once each, and stopped at where asked.

Between the scaler, which only counts, and the agent, which has a voice and a boundary.
"""

from typing import TYPE_CHECKING

from mpwatch.events import ScaleLimitReached
from mpwatch.vocabulary import scale_words
from mpwatch_agent.scaling import LossScaler, Update

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


class ScaleReports:
    """Tells of one scaler. `decided` takes each of its updates."""

    def __init__(self, agent: "Agent", scaler: LossScaler) -> None:
        self._agent = agent
        self._scaler = scaler
        # The limit that was said last, and where: being pressed against it says no more.
        self._said: tuple[str, float] | None = None

    def decided(self, update: Update) -> None:
        """A window is over: say what is worth saying of its update."""
        self._agent.loop.looked_at_gradients = True
        if update.reached:
            self._limit(update.reached, "warn", update.after)
        if update.pressed:
            policy = self._scaler.policy
            action = policy.at_floor if update.pressed == "floor" else policy.at_ceiling
            if action != "warn" or self._said != (update.pressed, update.after):
                self._limit(update.pressed, action, update.after)

    def _limit(self, limit: str, action: str, scale: float) -> None:
        agent, scaler = self._agent, self._scaler
        self._said = (limit, scale)
        step = agent.loop.steps + 1
        agent.tell_at_once(
            ScaleLimitReached(
                limit=limit,
                scale=scale,
                action=action,
                step=step,
                overflows=scaler.overflow_total,
            )
        )
        agent.say(f"loss scale {scale_words(scale)} at step {step}: {_meaning(limit, scaler)}")
        if action == "stop":
            agent.boundary.stop(f"loss scale at its {limit}")


def _meaning(limit: str, scaler: LossScaler) -> str:
    counts = f"{scaler.overflow_total} of {scaler.overflow_total + scaler.clean_total} windows"
    if limit == "ceiling":
        return "at its ceiling, it grows no further"
    if limit == "floor":
        return f"at its floor while gradients still overflow ({counts}); such steps are skipped"
    return f"low: {counts} overflowed; no scale helps against what is not finite before it"
