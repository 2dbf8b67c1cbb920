"""How accumulation gets into a loop: from the start or by command, with its patches, and out.

Owns the settings and what is said; the arithmetic and the refusals are `accumulation`'s. Nothing
of it exists in a run that does not ask for it.
"""

import contextlib
from typing import TYPE_CHECKING, Any

from mpwatch.commands import SetAccumulation
from mpwatch.events import AccumulationChanged
from mpwatch_agent import batch_statistics, hooks_accumulation
from mpwatch_agent.accumulation import Accumulation
from mpwatch_agent.diagnoses import Diagnosis
from mpwatch_agent.patches import PatchTable
from mpwatch_agent.rate_part import RatePart
from mpwatch_agent.schedules import Schedules

# So many windows are watched before the first live change.
WATCHED_WINDOWS = 2

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


class Accumulating:
    """What was asked for, and the part that does it once it is needed."""

    def __init__(self, agent: "Agent", settings: dict[str, Any]) -> None:
        self._agent = agent
        self._k = int(settings.get("accumulate") or 1)
        self.schedule = str(settings.get("schedule") or "updates")
        self._diagnosed: set[str] = set()
        self._rule = str(settings.get("lr_rule") or "none")
        self._ramp = int(settings.get("lr_ramp") or 0)
        self._noise_scale = settings.get("noise_scale")
        self.part: Accumulation | None = None
        self.schedules: Schedules | None = None
        self._table: PatchTable | None = None

    def install(self, table: PatchTable) -> None:
        """The hooks go on; accumulate from the first window if that was asked for."""
        self._table = table
        if self._k > 1:
            self.begin(self._k)
            self._tell(1, self._k, "start")

    def begin(self, k: int) -> Accumulation:
        """Put the part and its patches on."""
        assert self._table is not None
        agent = self._agent
        part = self.part = Accumulation(agent.loop, k, self._refused, lambda: agent.gate.compiles)
        part.at_window_start = self._at_backward
        part.notices.say = self._diagnose
        part.at_first_forward = self._name_batch_statistics
        self.schedules = Schedules(part, agent.loop, self.schedule, self._diagnose)
        agent.loop.lazy = False
        agent.loop.concluded = agent.guard_steering("steering at a window's end", part.concluded)
        agent.steering.add(part)
        if self._rule != "none":
            agent.steering.add(self._rate_part())
        hooks_accumulation.install(self._table, agent, self)
        return part

    def _rate_part(self) -> RatePart:
        return RatePart(
            self._agent.loop, self._rule, self._noise_scale, self._ramp, self._rate_refused
        )

    def _rate_refused(self, reason: str) -> None:
        self._diagnose("lr_rule_refused", f"the learning rate stays the script's: {reason}", "")

    def _diagnose(self, name: str, evidence: str, advice: str) -> None:
        if name not in self._diagnosed:
            self._diagnosed.add(name)
            diagnosis = Diagnosis(name, "warning", evidence, advice)
            self._agent.observing.diagnoser.raise_(diagnosis)

    def _name_batch_statistics(self, k: int | None = None) -> None:
        """Before K changes, and before the first forward: who looks at a whole micro-batch."""
        root = self._agent.roots.first()
        count = (self._k if k is None else k) * self._script_window()
        found = None if root is None else batch_statistics.named([root], count)
        if found is not None:
            self._agent.observing.diagnoser.raise_(found)

    def prepare(self) -> None:
        """A change of K waits: begin to watch, also where no forward will ask for it."""
        if self.part is None:
            self.begin(1)

    def release(self) -> None:
        """The hooks come off: gradients of an open window are the script's own again."""
        part = self.part
        if part is not None and part.gathering:
            with contextlib.suppress(Exception):
                part.refuse("the hooks were taken off")

    def command(self, command: SetAccumulation) -> str | None:
        """Change K at this boundary.

        Returns:
            A note on what was done; None while the loop is not known well enough yet.

        Raises:
            ValueError: accumulation is refused in this loop, and why.
        """
        part = self.part or self.begin(1)
        if part.refused is not None:
            raise ValueError(f"accumulation is refused: {part.refused}")
        if part.gathering or part.windows_watched < WATCHED_WINDOWS:
            return None
        if part.k == 1 and part.unfit is not None:
            raise ValueError(f"accumulation is refused: {part.unfit}")
        before, after = part.k, command.multiplier
        window = self._script_window()
        if before == after:
            return f"was {after} already"
        self._name_batch_statistics(after)
        part.k = after
        self._tell(before, after, "command")
        return f"{window * after} micro-batches per update ({window} of the script x {after})"

    def _script_window(self) -> int:
        leader = self._agent.loop.tracks.leader
        return max(1, leader.usual_window) if leader is not None else 1

    def _at_backward(self) -> None:
        self._agent.boundary.settle_deferred(in_backward=True)

    def _refused(self, reason: str) -> None:
        from mpwatch_agent.agent import say_on_stderr

        say_on_stderr(f"accumulation refused: {reason}")
        self._agent.reports.tell(
            AccumulationChanged(
                step=self._agent.loop.steps, multiplier=1, previous=self._k, reason=reason,
                refused=True,
            )
        )  # fmt: skip

    def _tell(self, before: int, now: int, reason: str) -> None:
        self._k = now
        self._agent.reports.tell(
            AccumulationChanged(
                step=self._agent.loop.steps, multiplier=now, previous=before, reason=reason
            )
        )
