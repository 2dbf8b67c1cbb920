"""Optimizers whose class was made before our hooks: watched by hooks on the optimizer itself.

Such a hook cannot keep a step from running. Where one is to be skipped the gradients are out of
sight meanwhile: every optimizer passes over weights that have none.
"""

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_ident = threading.get_ident


def adopt(agent: "Agent", optimizer: Any) -> list[Any]:
    """Watch `optimizer`; the handles of its hooks, none where its class is seen anyway."""
    if getattr(type(optimizer).step, "mpwatch_sees", False):
        return []
    begins = agent.guard("step of an adopted optimizer", agent.updates.step_begins)
    ends = agent.guard("end of step of an adopted optimizer", agent.updates.step_ends)
    called = agent.guard_steering("steering at an adopted step", agent.steering.step_called)
    gate, loop, skipping = agent.gate, agent.loop, agent.steering.skipping
    steady = agent.steady
    hidden: list[tuple[Any, Any]] = []
    running: list[bool] = []

    def before(adopted: Any, args: Any, kwargs: Any) -> None:
        if not gate.open:
            return
        if running:
            # Its last step has raised: no hook hears of that.
            loop.step_left(0)
        running[:] = [True]
        if gate.steady and gate.thread == _ident() and steady.step_begins(args, kwargs):
            return
        if gate.steers:
            called(adopted, args, kwargs)
        begins(adopted)
        if id(adopted) in skipping:
            skipping.discard(id(adopted))
            loop.step_skipped = True
            for group in adopted.param_groups:
                for parameter in group["params"]:
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def after(adopted: Any, args: Any, kwargs: Any) -> None:
        while hidden:
            parameter, gradient = hidden.pop()
            parameter.grad = gradient
        running.clear()
        noted = False
        try:
            noted = gate.steady and gate.thread == _ident() and steady.step_ended()
        finally:
            # Where it is counted already, nothing is left running.
            if not noted and gate.open and loop.windows.stepping:
                ends(adopted, True)

    return [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]
