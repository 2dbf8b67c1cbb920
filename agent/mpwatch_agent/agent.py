"""The agent of one process: puts the parts together, binds to its rank, sends, ends.

Owns the order of things; what is seen belongs to `loop`, what is asked to `boundary`. Made once
per process, by `entry` in a supervised script or by `watch()`.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpwatch import faults, rendezvous
from mpwatch.events import (
    AgentExited,
    Event,
    HookDisabled,
)
from mpwatch.vocabulary import STDERR_PREFIX, clean_text
from mpwatch_agent import adopting, asked, binding, carried, hooks
from mpwatch_agent.accumulating import Accumulating
from mpwatch_agent.boundary import Boundary
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.faulting import Faults
from mpwatch_agent.loop import Loop
from mpwatch_agent.observing import Observing
from mpwatch_agent.orphan import orphan_of
from mpwatch_agent.outbox import Outbox
from mpwatch_agent.patches import PatchTable
from mpwatch_agent.reports import Reports, loop_found
from mpwatch_agent.roots import Roots
from mpwatch_agent.sampling import Sampling
from mpwatch_agent.shield import Gate, Shield
from mpwatch_agent.steady import Steady
from mpwatch_agent.steering import Steering
from mpwatch_agent.updates import Updates
from mpwatch_agent.windows import sizes_of

# How long the end of the script may wait for the hub to take the last events.
EXIT_LINGER_S = 0.3

_installed: "Agent | None" = None


def install_for_run(spec: dict[str, Any]) -> "Agent":
    """Make the agent of a supervised script; torch has just been imported.

    Raises:
        MpwatchError, KeyError, TypeError: the specification is not one this version understands.
    """
    global _installed
    _installed = Agent(spec)
    _installed.install()
    return _installed


def install_here(spec: dict[str, Any] | None) -> "Agent":
    """Make an agent for a process that asked for one by itself; `spec` None: it stays silent."""
    global _installed
    _installed = Agent(spec)
    _installed.install()
    return _installed


def installed() -> "Agent | None":
    """The agent of this process, if one watches it."""
    return _installed if _installed is not None and _installed.gate.open else None


class Agent:
    """Everything that watches one process. Methods named like moments are called by hooks."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        settings = (spec or {}).get("settings", {})
        self._spec = spec
        self._pid = os.getpid()
        self._rank = binding.number_from("RANK", 0)
        # Two threads may make their optimizers at once; sockets belong to one of them.
        self._claiming = threading.Lock()
        self.knows_loop = False
        self.gate = Gate()
        self.reports = Reports(self.gate)
        self._shield = Shield(self.gate, self._hook_failed)
        self.guard = self._shield.guard
        self.steering = Steering(self.gate)
        self.sampling = Sampling(
            self.gate, settings.get("grad_norm_every"), settings.get("memory_every")
        )
        self.loop = Loop(self._step_over, self.reports.tell, self.sampling)
        self.boundary = Boundary(self.loop, self.flush, settings.get("max_steps"))
        self.roots = Roots(
            self.guard("forward of a root", self.forward_begins), self.guard, self.gate, self.loop
        )
        self.observing = Observing(
            self._shield,
            self.gate,
            self.loop,
            self.roots,
            self.sampling,
            settings,
            self.tell_at_once,
            say_on_stderr,
            None if spec is None else spec["run_directory"],
        )
        self.steady = Steady(self, self._hook_failed)
        self.gate.leave = self.steady.leave
        self.roots.noted = self.steady.forward
        self.faults = self._make_faults(settings.get("inject") or [])
        self._table = PatchTable()
        self.accumulating = Accumulating(self, settings)
        self.boundary.defers = self.accumulating.command
        self.boundary.prepares = self.accumulating.prepare
        self._handles: list[Any] = []
        self._adopted: list[weakref.ref[Any]] = []
        self.updates = Updates(self)
        self._let_go = self.guard("steering at the end of watching", self.steering.abandon)
        self._loop_known = self.guard_steering(
            "steering once the loop is known", self.steering.loop_known
        )
        self.wishes = settings
        asked.put_on(self, settings)
        self._forward_steered = self.guard_steering(
            "steering at a forward", self.steering.forward_begins
        )
        self._act_for_watch = self.guard("command in a watched loop", self.act)

    def _make_faults(self, texts: list[str]) -> Faults | None:
        wanted = [faults.parse(text) for text in texts]
        mine = [fault for fault in wanted if fault.rank in (None, self._rank)]
        if not mine or self._spec is None:
            return None
        runtime = Path(self._spec["runtime_directory"])
        directory = Path(self._spec["run_directory"])
        return Faults(mine, self.loop, self.roots, runtime, directory, self.tell_at_once)

    def install(self) -> None:
        """Put the hooks on."""
        missing = hooks.install(self._table, self)
        self.roots.notes.extend(f"this torch has no {name}" for name in missing)
        os.register_at_fork(after_in_child=self._forked)
        self.accumulating.install(self._table)
        self.gate.open = True

    def adopt(self, optimizer: Any) -> None:
        """Watch an optimizer that was made before the hooks were put on."""
        if not any(known() is optimizer for known in self._adopted):
            self.optimizer_made(optimizer)

    def hook_as_well(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put on a hook that only something asked for needs, once."""
        if f"{getattr(owner, '__name__', owner)}.{name}" not in self._table.names():
            self._table.replace(owner, name, make)

    def detach(self, error: BaseException | None = None) -> None:
        """End watching this process, because of `error` or none, and say so to the hub."""
        if self.gate.open:
            self.remove()
            self._exit(error)

    def descriptors_close(self, low: int, high: int) -> None:
        """The script closes descriptors wholesale; without its own, libzmq ends the process."""
        outbox = self.reports.outbox
        if outbox is not None and outbox.holds_descriptor(low, high):
            say_on_stderr("goes on unwatched: the script closes all file descriptors")
            self.detach()

    def guarded_act(self) -> None:
        """Let commands act, from a loop that asks by itself."""
        mine = self.gate.thread == threading.get_ident()
        if mine and self.gate.steady and not self.steady.is_asked(time.perf_counter()):
            return
        if self.gate.open:
            self._act_for_watch()

    def remove(self) -> None:
        """Take every hook off again; what was seen stays reported."""
        self.gate.leave()
        if self.gate.steers:
            self._let_go("the loop is not watched any more")
        self.gate.open = False
        self.accumulating.release()
        self._table.restore()
        self.roots.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._adopted.clear()

    # --- moments of the loop ----------------------------------------------------------------

    def optimizer_made(self, optimizer: Any) -> None:
        if not self.gate.bound:
            self.bind()
        self.loop.tracks.of(optimizer)
        self.loop.lazy = self._may_wait() and len(self.loop.tracks.live) == 1
        self.roots.optimizer_made(optimizer)
        self.observing.optimizer_made()
        if self.gate.open:
            # One made by now may be of a class that was hooked before us.
            self._adopted.append(weakref.ref(optimizer))
            self._handles.extend(adopting.adopt(self, optimizer))

    def _may_wait(self) -> bool:
        """Whether hooks may leave their work to the next one: nobody has to act in between."""
        return self.faults is None and not self.gate.steers

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins where faults are injected; elsewhere the loop is told directly."""
        assert self.faults is not None
        if not self.loop.windows.roots_seen:
            self.faults.window_forward()
        self.loop.backward_begins(tensors)
        self.faults.phase_begins("backward")

    def backward_ends(self, completed: bool) -> None:
        assert self.faults is not None
        self.faults.backward_done()
        self.loop.backward_ends(completed)

    def loader_begins(self) -> BaseException | None:
        loop = self.loop
        stop = None
        loop.settle()
        if not loop.windows.unstepped:
            stop = self.boundary.act(repeat=False)
        loop.loader_begins()
        if self.faults is not None:
            self.faults.phase_begins("data")
        return stop

    def forward_begins(self, now: float, training: bool, arguments: Any) -> BaseException | None:
        """A root's forward begins at `now`, seen by its hook."""
        loop = self.loop
        stop = None
        loop.settle()
        if training and not loop.windows.unstepped:
            stop = self.boundary.act()
            # What acting took (a pause) is no part of the forward.
            now = time.perf_counter()
        if training and not loop.windows.unstepped:
            self.boundary.settle_deferred()
        if training and self.gate.steers:
            self._forward_steered(arguments)
        loop.forward_begins(now, training, sizes_of(arguments))
        if training and self.faults is not None:
            self.faults.window_forward()
        return stop

    def act(self) -> BaseException | None:
        """A place where a command may act, though no forward or loader was ever seen."""
        return self.boundary.act()

    def guard_steering(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Guard a function of `steering`: if it fails, the loop is the script's own again."""
        return self._shield.guard_steering(name, function, self.steering.abandon)

    # --- events out -------------------------------------------------------------------------

    def _step_over(self, draft: StepDraft) -> None:
        located = None
        try:
            if draft.optimizer == 0:
                self._leader_stepped(draft)
            located = self.observing.before_report(draft)
        finally:
            # Also where the script interrupts us: it is counted.
            self.reports.step(draft, self.loop.steps)
        self.observing.after_report(draft, located)
        self.steady.step_over(draft)

    def _leader_stepped(self, draft: StepDraft) -> None:
        self.sampling.step_over(self.loop, draft)
        if self.roots.searching:
            self.roots.step_seen()
        # Once two windows were seen, what there is of a loop is known.
        if not self.knows_loop and draft.step - self.loop.steps_before >= 2:
            self._say_loop()
            if self.gate.steers:
                self._loop_known()

    def _say_loop(self) -> None:
        self.knows_loop = True
        self.reports.tell(loop_found(self.loop, self.roots, self.gate.compiles))

    def tell_at_once(self, event: Event) -> None:
        """Send `event` and what waits, now."""
        self.reports.tell(event)
        self.flush()

    def say(self, line: str) -> None:
        """One line on the script's stderr, where this process is the rank's own."""
        if self.reports.outbox is not None or self._spec is None:
            say_on_stderr(line)

    def flush(self) -> None:
        """Send what waits, now."""
        self.reports.flush(self.loop.steps)

    def _hook_failed(self, hook: str, error: str) -> None:
        error = clean_text(error, 300)
        say_on_stderr(f"hook {hook} switched itself off: {error}")
        self.tell_at_once(HookDisabled(hook=hook, error=error))

    # --- binding ----------------------------------------------------------------------------

    def bind(self) -> None:
        """This process trains: take its rank, or go silent if another process has it."""
        with self._claiming:
            if not self.gate.bound:
                self._bind()
                self.gate.bound = True

    def claim_thread(self) -> None:
        """The first backward shows which thread's loop is watched; others pass through."""
        with self._claiming:
            if self.gate.thread is None:
                self.gate.thread = threading.get_ident()
                self.loop.tracks.forget_other_threads()
                self.loop.lazy = self._may_wait() and len(self.loop.tracks.live) <= 1

    def _bind(self) -> None:
        if self._spec is None:
            return
        runtime = Path(self._spec["runtime_directory"])
        attempt = int(self._spec["attempt"])
        binding.restore_environment(self._spec)
        place = binding.take_rank(runtime, attempt, self._rank)
        if place is None:
            self.remove()
            return
        if binding.descriptors_left() < binding.DESCRIPTORS_NEEDED:
            say_on_stderr("runs unwatched: too few file descriptors left (ulimit -n)")
            self.remove()
            return
        self.loop.steps_before = place.steps
        endpoint = rendezvous.agent_endpoint(runtime)
        outbox = Outbox(endpoint, str(self._spec["run_id"]), attempt, self._rank, place.sequence)
        self.boundary.connect(outbox, Path(self._spec["run_directory"]))
        self.boundary.orphan = orphan_of(self._spec)
        atexit.register(self._exit)
        # What came before (imports, data sets) is no part of the first step.
        self.loop.phases.restart(time.perf_counter())
        if self.sampling.memory_every:
            self.sampling.sample_memory(self.loop)
        self.reports.connect(outbox, place, binding.describe_process(place.process))
        self.flush()

    # --- the end ----------------------------------------------------------------------------

    def _forked(self) -> None:
        """In a forked child: no hook acts, no socket is touched, nothing is said."""
        self.gate.open = False
        self.steady.forget()
        self.reports.abandon()

    def _exit(self, error: BaseException | None = None) -> None:
        """At the interpreter's end (or when detached), in the process that was bound."""
        if os.getpid() != self._pid or self.reports.outbox is None:
            return
        with contextlib.suppress(Exception):
            self.gate.leave()
            self.gate.open = False
            if self.faults is not None:
                self.faults.at_exit()
            left_open = self.loop.end()
            self.boundary.at_exit()
            for line in self.observing.last_lines():
                say_on_stderr(line)
            self.reports.release(wait=True)
            if not self.knows_loop:
                self._say_loop()
                self._loop_known()
            # The interpreter keeps an uncaught exception; no hook of the script is replaced.
            self.reports.tell(
                self._last_words(error or getattr(sys, "last_value", None), left_open)
            )
            self.flush()
        outbox, self.reports.outbox = self.reports.outbox, None
        with contextlib.suppress(Exception):
            outbox.close(EXIT_LINGER_S)

    def _last_words(self, error: BaseException | None, left_open: int) -> AgentExited:
        return AgentExited(
            steps=self.loop.steps,
            error_type=None if error is None else type(error).__name__,
            error=None if error is None else clean_text(str(error), 500),
            windows_open=left_open,
            windows_dropped=self.loop.windows.kept_back() + carried.total(),
        )


def say_on_stderr(line: str) -> None:
    """One line of ours on the script's stderr, past whatever the script made of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, f"{STDERR_PREFIX}{line}\n".encode())
