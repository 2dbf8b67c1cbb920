"""Wrappers around an optimizer's life: made, its step, its gradients cleared.

Thin and all the same: a flag test, our guarded part, the original outside every `try` of ours,
our guarded part again. `hooks` puts them on.
"""

import functools
import threading
from typing import TYPE_CHECKING, Any

from mpwatch_agent.wrapping import Wrap, wrapper

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_ident = threading.get_ident


def optimizer_made(agent: "Agent") -> Wrap:
    gate = agent.gate
    made = agent.guard("Optimizer.__init__", agent.optimizer_made)

    def make(original: Any) -> Any:
        @wrapper(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not gate.passes():
                made(self)

        return __init__

    return make


def scheduler_made(agent: "Agent") -> Wrap:
    gate = agent.gate
    made = agent.guard("LRScheduler.__init__", agent.observing.windows.scheduler_made)

    def make(original: Any) -> Any:
        @wrapper(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not gate.passes():
                made(self)

        return __init__

    return make


def profile_hook_step(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("Optimizer.step", agent.updates.step_begins)
    ends = agent.guard("end of Optimizer.step", agent.updates.step_ends)
    swallows = agent.guard_steering("steering at step", agent.steering.swallows_step)
    steer = agent.guard_steering("steering into a step", agent.steering.step_begins)
    steered = agent.guard_steering("steering after a step", agent.steering.step_ended)
    skipping = agent.steering.skipping
    steady = agent.steady

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def profile_hook_step(func: Any) -> Any:
            hooked = original(func)

            @wrapper(hooked)
            def step(*args: Any, **kwargs: Any) -> Any:
                if gate.steady and gate.thread == _ident() and steady.step_begins(args, kwargs):
                    completed = False
                    try:
                        result = hooked(*args, **kwargs)
                        completed = True
                        return result
                    finally:
                        noted = False
                        try:
                            noted = completed and steady.step_ended()
                        finally:
                            # Where it is counted already, nothing is left running.
                            if not noted and loop.windows.stepping:
                                try:
                                    ends(args[0], completed)
                                finally:
                                    loop.step_left(0)
                if gate.passes():
                    return hooked(*args, **kwargs)
                if gate.steers and swallows(args[0], args[1:], kwargs):
                    return None
                stepping = loop.windows.stepping
                completed = False
                try:
                    if loop.updating is args[0]:
                        loop.tracks.live[0].depth += 1
                        loop.windows.stepping += 1
                    else:
                        begins(args[0])
                    if gate.steers:
                        steer(args[0])
                    if skipping and id(args[0]) in skipping:
                        skipping.discard(id(args[0]))
                        loop.step_skipped = completed = True
                        return None
                    result = hooked(*args, **kwargs)
                    completed = True
                    return result
                finally:
                    try:
                        ends(args[0], completed)
                    finally:
                        # Whatever was interrupted where, nothing is left half counted.
                        loop.step_left(stepping)
                        if gate.steers:
                            steered(args[0], completed)

            step.mpwatch_sees = True
            return step

        return profile_hook_step

    return make


def zero_grad(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    act = agent.guard("command at zero_grad", agent.act)
    cleared = agent.guard("Optimizer.zero_grad", loop.optimizer_cleared)
    steered = agent.guard_steering("steering at zero_grad", agent.steering.cleared)

    def make(original: Any) -> Any:
        @wrapper(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if gate.steady and not loop.windows.unstepped and gate.thread == _ident():
                # There is nothing that could be thrown away.
                return original(self, *args, **kwargs)
            if gate.passes():
                return original(self, *args, **kwargs)
            if not (loop.windows.roots_seen or loop.loader_seen):
                stop = act()
                if stop is not None:
                    raise stop
            result = original(self, *args, **kwargs)
            if gate.steers:
                steered(self)
            if loop.windows.clears_by_hook and loop.at_rest():
                return result
            cleared(self)
            return result

        return zero_grad

    return make


def module_zero_grad(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    act = agent.guard("command at zero_grad of a module", agent.act)
    look = agent.guard("probes", loop.probes)
    cleared = agent.guard("Module.zero_grad", loop.windows.module_cleared)
    steered = agent.guard_steering(
        "steering at zero_grad of a module", agent.steering.module_cleared
    )

    def make(original: Any) -> Any:
        @wrapper(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if gate.steady and not loop.windows.unstepped and gate.thread == _ident():
                # There is nothing that could be thrown away.
                return original(self, *args, **kwargs)
            if gate.passes():
                return original(self, *args, **kwargs)
            if not (loop.windows.roots_seen or loop.loader_seen):
                stop = act()
                if stop is not None:
                    raise stop
            if loop.windows.clears_by_hook and loop.at_rest():
                return original(self, *args, **kwargs)
            before = look()
            result = original(self, *args, **kwargs)
            if gate.steers:
                steered(self)
            if before:
                cleared(before)
            return result

        return zero_grad

    return make
