"""`watch()`: the same agent, asked for from inside a script or a notebook.

For loops that start without `mpwatch run`, or that want to end by themselves at a boundary. In a
supervised process it returns a view of the agent that is there already.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mpwatch_agent import agent as agents
from mpwatch_agent import asked
from mpwatch_agent.agent import Agent

if TYPE_CHECKING:
    from mpwatch_agent.accumulator import Accumulator
    from mpwatch_agent.scaler_presets import Policy

_Batch = TypeVar("_Batch")
_SERVE_DEADLINE_S = 20.0


def watch(
    *optimizers: Any,
    serve: bool | None = None,
    name: str | None = None,
    max_steps: int | None = None,
    precision: str | None = None,
    scaler: "str | Policy | None" = None,
    on_nonfinite: str | None = None,
) -> "Watch":
    """Watch the training loop of this process.

    Call it before the loop. Optimizers made before the call are given to it; later ones are seen
    by themselves. Without `mpwatch run` around the script nothing is sent anywhere, unless
    `serve` (or the environment's `MPWATCH_SERVE=1`) starts a hub that records the run. Calling it
    again returns the same watch: hooks never pile up.

    Args:
        optimizers: `torch.optim` optimizers that exist already.
        serve: start a hub for this process; None asks the environment.
        name: the run's name where a hub is started; the script's name by default.
        max_steps: end `batches()` after so many finished steps of the first optimizer.
        precision: "O0" to "O3", alone or with ":fp16" or ":bf16", for a loop that has no mixed
            precision of its own; as `--precision`.
        scaler: a loss scaler's name, or a `Policy` with its knobs (`scaler_presets.policy_of`).
        on_nonfinite: "warn", "skip" or "stop", for gradients that no loss scaler looks at.

    Returns:
        A `Watch`, which is also a context manager that detaches at its end.

    Raises:
        ValueError: `max_steps` is below 1, or a word that is not allowed, or another precision
            or scaler than an earlier call asked for.

    Example:
        >>> with watch(optimizer) as job:
        ...     for batch in job.batches(loader):
        ...         train_on(batch)
    """
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}; it must be 1 or more")
    agent = agents.installed()
    if agent is None:
        wanted = os.environ.get("MPWATCH_SERVE") == "1" if serve is None else serve
        agent = agents.install_here(_start_hub(name) if wanted else None)
    wishes = {"precision": precision, "scaler": scaler, "on_nonfinite": on_nonfinite}
    asked.ask_again(agent, {key: value for key, value in wishes.items() if value is not None})
    for optimizer in optimizers:
        agent.adopt(optimizer)
    if max_steps is not None:
        if agent.gate.thread == threading.get_ident():
            # How many steps were left was known when they began to be only noted.
            agent.gate.leave()
        agent.boundary.limit(max_steps)
    return Watch(agent)


class Watch:
    """A watched loop. `steps` counts finished steps; `stopping` says that the loop should end."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def steps(self) -> int:
        """Finished steps (applied and skipped) of the first optimizer that stepped."""
        return self._agent.loop.steps

    @property
    def stopping(self) -> bool:
        """Whether a command or `max_steps` has asked the loop to end."""
        return self._agent.boundary.stop_reason is not None

    def batches(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Iterate over `batches`; ends early, at a boundary, when the loop is asked to stop."""
        boundary = self._agent.boundary
        boundary.ends_iteration = True
        try:
            iterator = iter(batches)
            while True:
                self._agent.guarded_act()
                if self.stopping:
                    return
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                yield batch
        finally:
            boundary.ends_iteration = False

    def accumulator(self, optimizer: Any, window: int, **options: Any) -> "Accumulator":
        """Gather `window` micro-batches per update of `optimizer`; options as `Accumulator`'s.

        Example:
            >>> gather = job.accumulator(optimizer, 4, clip=1.0)
            >>> for x, y in gather.batches(loader):
            ...     gather.backward(loss_of(model(x), y), weight=len(x))
        """
        from mpwatch_agent import carried
        from mpwatch_agent.accumulator import Accumulator

        self._agent.adopt(optimizer)
        gather = Accumulator(optimizer, window, **options)
        gather.tells_worth = self._agent.loop.losses.window_is_worth
        gather.tells_open = carried.another()
        return gather

    def detach(self) -> None:
        """Take every hook off. The loop goes on unwatched; detaching twice is harmless."""
        self._agent.detach()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._agent.detach(error)


def _start_hub(name: str | None) -> dict[str, Any] | None:
    """Have a run directory and a hub made for this process; None (and one line) when it fails."""
    command = [sys.executable, "-P", "-m", "mpwatch.cli.main", "serve", "--pid", str(os.getpid())]
    if name is not None:
        command += ["--name", name]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=_SERVE_DEADLINE_S
        )
        spec = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        spec = None
    if not isinstance(spec, dict):
        agents.say_on_stderr("no hub could be started; this run is not recorded")
        return None
    return spec
