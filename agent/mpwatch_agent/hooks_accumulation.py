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
    table.replace(
        swa_utils.AveragedModel, "update_parameters", averaged_update(agent, accumulating)
    )


def clipping(agent: "Agent", accumulating: "Accumulating") -> Wrap:
    gate = agent.gate
    part = accumulating.part
    assert part is not None
    swallows = agent.guard_steering("steering at clipping", part.swallows_clipping)

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
