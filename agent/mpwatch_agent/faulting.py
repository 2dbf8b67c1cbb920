"""Puts faults in where `--inject` names them; the one part of the agent that disturbs on purpose.

Each fault fires once for each step it names, across restarts too: a marker file in the runtime
directory is made before it fires. Not installed at all unless faults were asked for.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpwatch import rendezvous
from mpwatch.events import Event, FaultInjected
from mpwatch.faults import Fault
from mpwatch_agent.loop import Loop
from mpwatch_agent.roots import Roots
from mpwatch_agent.unfired import Unfired

SLOW_S = 1.0
HUB_STOP_S = 10.0


class Faults:
    """The faults of one rank, and where in the loop each fires."""

    def __init__(
        self,
        faults: list[Fault],
        loop: Loop,
        roots: Roots,
        runtime: Path,
        run_directory: Path,
        tell: Callable[[Event], None],
    ) -> None:
        self._faults = faults
        self._loop = loop
        self._roots = roots
        self._runtime = runtime
        self._run_directory = run_directory
        self._tell = tell
        self._output_hooks: list[Any] = []
        self._stopped_hub: tuple[int, float] | None = None
        self._unfired = Unfired()

    # --- moments --------------------------------------------------------------------------

    def window_forward(self) -> None:
        """A training forward (or, unseen, its backward) of the step in progress begins."""
        self._continue_hub()
        micro = self._loop.windows.micro_index()
        for index, fault in self._due():
            self._unfired.saw(index, micro)
            if fault.name == "nan":
                self._nan(index, fault, micro)
            elif micro == 0 and (fault.name != "slow" or fault.phase in (None, "forward")):
                self._at_first_forward(index, fault)

    def phase_begins(self, phase: str) -> None:
        """A phase that is not forward begins: where a `slow` was aimed at it."""
        for index, fault in self._due():
            if fault.name == "slow" and fault.phase == phase:
                self._at_first_forward(index, fault)

    def backward_done(self) -> None:
        """An outermost backward returned: overflow in a named micro-batch."""
        for hook in self._output_hooks:
            hook.remove()
        self._output_hooks.clear()
        micro = self._loop.windows.micro_index()
        for index, fault in self._due():
            self._unfired.saw(index, micro)
            if fault.name == "overflow" and fault.micro == micro:
                self._overflow(index, fault, micro)

    def before_update(self) -> None:
        """The last backward of the window is over: overflow in the last micro-batch."""
        for index, fault in self._due():
            if fault.name == "overflow" and fault.micro is None:
                self._overflow(index, fault, self._last_micro())

    def at_exit(self) -> None:
        """The interpreter ends: a hub that was stopped goes on, what never fired is said."""
        self._let_hub_go()
        with contextlib.suppress(Exception):  # the agent's last words follow, come what may
            self._say_unfired()

    def _let_hub_go(self) -> None:
        if self._stopped_hub is not None:
            self._signal(self._stopped_hub[0], signal.SIGCONT)
            self._stopped_hub = None

    def _say_unfired(self) -> None:
        from mpwatch_agent.agent import say_on_stderr

        # The marker files are those of every attempt and rank.
        fired = {name.rpartition("-")[0] for name in os.listdir(self._runtime)}
        for index, fault in enumerate(self._faults):
            if f"fault-{index}" not in fired:
                say_on_stderr(self._unfired.line(index, fault, self._loop.steps))

    # --- faults ---------------------------------------------------------------------------

    def _due(self) -> list[tuple[int, Fault]]:
        step = self._loop.steps + 1
        return [(i, fault) for i, fault in enumerate(self._faults) if fault.names_step(step)]

    def _fires(self, index: int) -> bool:
        """Take the one shot of fault `index` at this step."""
        step = self._loop.steps + 1
        marker = self._runtime / f"fault-{index}-{step}"
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            return False
        return True

    def _said(self, fault: Fault, micro: int | None, target: str) -> None:
        step = self._loop.steps + 1
        self._tell(FaultInjected(fault=fault.name, step=step, micro_batch=micro, target=target))

    def _at_first_forward(self, index: int, fault: Fault) -> None:
        if fault.name not in ("kill", "slow", "hub-kill", "hub-stop") or not self._fires(index):
            return
        self._said(fault, None, fault.phase or "")
        if fault.name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.name == "slow":
            time.sleep(SLOW_S)
            self._loop.sampling.not_ours(SLOW_S)
        elif fault.name == "hub-kill":
            self._signal(self._hub_pid(), signal.SIGKILL)
        else:
            pid = self._hub_pid()
            self._signal(pid, signal.SIGSTOP)
            if pid is not None:
                self._stopped_hub = (pid, time.monotonic() + HUB_STOP_S)

    def _continue_hub(self) -> None:
        if self._stopped_hub is not None and time.monotonic() >= self._stopped_hub[1]:
            self._let_hub_go()

    def _hub_pid(self) -> int | None:
        endpoint = rendezvous.read_json(self._run_directory / rendezvous.ENDPOINT_FILE) or {}
        pid, start = endpoint.get("pid"), endpoint.get("start_time")
        return pid if isinstance(pid, int) and rendezvous.is_alive(pid, start) else None

    def _signal(self, pid: int | None, number: signal.Signals) -> None:
        if pid is not None:
            try:
                os.kill(pid, number)
            except OSError:
                return

    def _last_micro(self) -> int | None:
        """The leader's newest micro-batch, in a window that is about to end."""
        live = self._loop.tracks.live
        leader = self._loop.tracks.leader or (live[0] if live else None)
        return len(leader.window) - 1 if leader is not None and leader.window else None

    def _overflow(self, index: int, fault: Fault, micro: int | None) -> None:
        found = self._parameter(fault.param)
        if found is None or found[1].grad is None:
            wanted = f"parameter {fault.param}" if fault.param else "parameter"
            where = "in the optimizer" if found is None and fault.param else "with a gradient"
            self._unfired.missing(index, f"no {wanted} {where}")
            return
        if not self._fires(index):
            return
        name, parameter = found
        gradient = parameter.grad
        with torch.no_grad():
            values = gradient._values() if gradient.is_sparse else gradient
            values.fill_(float("inf"))
        self._said(fault, micro, name)

    def _parameter(self, name: str | None) -> tuple[str, Any] | None:
        """The parameter called `name`; without one the last of the last group with a gradient."""
        names = {id(p): n for root in self._root_modules() for n, p in root.named_parameters()}
        tracks = self._loop.tracks.live
        leader = self._loop.tracks.leader or (tracks[0] if tracks else None)
        optimizer = leader.ref() if leader else None
        if optimizer is None:
            return None
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        if name is None:
            usable = [p for p in owned if p.grad is not None]
            return (names.get(id(usable[-1]), "last parameter"), usable[-1]) if usable else None
        for parameter in owned:
            full = names.get(id(parameter), "")
            if full == name or full.removeprefix("_orig_mod.") == name:
                return name, parameter
        return None

    def _root_modules(self) -> list[Any]:
        first = self._roots.first()
        return [] if first is None else [first]

    def _nan(self, index: int, fault: Fault, micro: int) -> None:
        leader = self._loop.tracks.leader
        last = max(0, leader.usual_window * leader.multiplier - 1) if leader else 0
        if micro != (last if fault.micro is None else fault.micro):
            return
        root = self._roots.first()
        modules = dict(root.named_modules()) if root is not None else {}
        module = modules.get(fault.module or "")
        if module is None:
            wanted = (
                f"module {fault.module}" if fault.module and root is not None else "root module"
            )
            self._unfired.missing(index, f"no {wanted} was found")
            return
        if not self._fires(index):
            return
        self._output_hooks.append(module.register_forward_hook(_make_nan))
        self._said(fault, micro, fault.module or type(module).__name__)


def _make_nan(module: Any, arguments: Any, output: Any) -> Any:
    """A forward hook: every floating tensor of the output becomes NaN, gradients stay attached."""
    if isinstance(output, torch.Tensor):
        return output * float("nan") if output.is_floating_point() else output
    if isinstance(output, list | tuple):
        made = [_make_nan(module, arguments, item) for item in output]
        return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
    if isinstance(output, dict):
        return {key: _make_nan(module, arguments, value) for key, value in output.items()}
    return output
