"""Wrappers that only virtual accumulation needs, put on when it is asked for.

Clipping that must not clip in a swallowed window, what a script does once per update (schedulers,
averaged models), and `autograd.grad`, which no seed reaches.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import swa_utils

from mpwatch_agent.patches import PatchTable
from mpwatch_agent.wrapping import Wrap, wrapper

if TYPE_CHECKING:
    from mpwatch_agent.accumulating import Accumulating
    from mpwatch_agent.agent import Agent


def install(table: PatchTable, agent: "Agent", accumulating: "Accumulating") -> None:
    """Put them on."""
    clip_grad = torch.nn.utils.clip_grad
    if table.replace(clip_grad, "_clip_grads_with_norm_", clipping(agent, accumulating)):
        table.put(
            torch.nn.utils, "clip_grads_with_norm_", vars(clip_grad)["_clip_grads_with_norm_"]
        )
    table.replace(torch.autograd, "grad", autograd_grad(agent, accumulating))
    schedulers = torch.optim.lr_scheduler
    make = scheduler_step(agent, accumulating)
    for scheduler in _classes(schedulers.LRScheduler):
        table.replace(scheduler, "step", make)
    table.add(schedulers.LRScheduler, "__init_subclass__", scheduler_made(table, make))
    table.replace(
        swa_utils.AveragedModel, "update_parameters", averaged_update(agent, accumulating)
    )


def _classes(base: Any) -> list[Any]:
    """`base` and every class below it, each once."""
    found: dict[Any, None] = {base: None}
    for below in base.__subclasses__():
        found.update(dict.fromkeys(_classes(below)))
    return list(found)


def scheduler_made(table: PatchTable, make: Wrap) -> Any:
    """The `__init_subclass__` of schedulers: a class of the script's is hooked when it is made."""

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(torch.optim.lr_scheduler.LRScheduler, cls).__init_subclass__(**kwargs)
        table.replace(cls, "step", make)

    return classmethod(__init_subclass__)


def scheduler_step(agent: "Agent", accumulating: "Accumulating") -> Wrap:
    gate = agent.gate
    schedules = accumulating.schedules
    assert schedules is not None
    swallows = agent.guard_steering("steering at a scheduler", schedules.swallows)

    def make(original: Any) -> Any:
        @wrapper(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Schedulers step each other: the outermost decides.
            outermost = schedules.depth == 0
            if gate.steers and outermost and not gate.passes() and swallows(self, args, kwargs):
                return None
            schedules.depth += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                schedules.depth -= 1

        return step

    return make


def clipping(agent: "Agent", accumulating: "Accumulating") -> Wrap:
    gate = agent.gate
    part = accumulating.part
    assert part is not None
    swallows = agent.guard_steering("steering at clipping", part.clips.swallowed)

    def make(original: Any) -> Any:
        @wrapper(original)
        def clip_grads_with_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if gate.steers and not gate.passes():
                if not isinstance(parameters, torch.Tensor):
                    parameters = list(parameters)
                if swallows(parameters):
                    return None
            return original(parameters, *args, **kwargs)

        return clip_grads_with_norm_

    return make


def autograd_grad(agent: "Agent", accumulating: "Accumulating") -> Wrap:
    gate = agent.gate

    def make(original: Any) -> Any:
        @wrapper(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            part = accumulating.part
            if gate.steers and part is not None and not gate.passes():
                part.grads_taken += 1
            return original(*args, **kwargs)

        return grad

    return make


def averaged_update(agent: "Agent", accumulating: "Accumulating") -> Wrap:
    gate = agent.gate
    part = accumulating.part
    assert part is not None
    swallows = agent.guard_steering("steering at an averaged model", part.swallows_average)

    def make(original: Any) -> Any:
        @wrapper(original)
        def update_parameters(self: Any, model: Any) -> Any:
            if gate.steers and not gate.passes() and swallows(model):
                return None
            return original(self, model)

        return update_parameters

    return make
