"""Wrappers around what changes gradients before the step: the loss scaler and clipping.

Thin and all the same: a flag test, our guarded part, the original outside every `try` of ours,
our guarded part again. `hooks` puts them on.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch

from mpwatch_agent.wrapping import Wrap, wrapper

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_ident = threading.get_ident
# Scaled losses that no backward has used: kept no longer than this, they hold graphs.
MAX_UNSCALED = 16


def scale(agent: "Agent") -> Wrap:
    gate, loop, losses = agent.gate, agent.loop, agent.loop.losses
    several = agent.guard("GradScaler.scale", loop.losses.scaled)
    steering = agent.steering
    steer = agent.guard_steering("steering at scale", steering.scale_begins)

    def make(original: Any) -> Any:
        @wrapper(original)
        def scale(self: Any, outputs: Any) -> Any:
            if steering.scales and self._enabled and not gate.passes():
                steer(self)
            result = original(self, outputs)
            if self._enabled and gate.open and (gate.thread is None or gate.thread == _ident()):
                loop.scaler = self
                loop.scaled = loop.still_scaled = True
                if len(losses.unscaled) > MAX_UNSCALED:
                    losses.unscaled.clear()
                if type(outputs) is torch.Tensor:
                    # Kept until the backward that follows, which reads the value of it.
                    losses.unscaled[id(result)] = (result, outputs)
                else:
                    several(outputs, result)
            return result

        return scale

    return make


def unscale(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("GradScaler.unscale_", agent.updates.unscale_begins)
    ends = agent.guard("end of GradScaler.unscale_", agent.observing.unscale_ends)
    swallows = agent.guard_steering("steering at unscale_", agent.steering.swallows_unscale)
    steady = agent.steady

    def ended(scaler: Any, optimizer: Any, completed: bool) -> None:
        if not gate.passes():
            ends(scaler, optimizer, completed)

    def make(original: Any) -> Any:
        @wrapper(original)
        def unscale_(self: Any, optimizer: Any) -> Any:
            noted = False
            if gate.steady and gate.thread == _ident():
                noted = not self._enabled or steady.unscale(self, optimizer)
            if not noted and not gate.passes():
                if gate.steers and swallows(self, optimizer):
                    return None
                begins(self, optimizer)
            completed = False
            try:
                result = original(self, optimizer)
                completed = True
                return result
            finally:
                noted = noted and completed
                if self._enabled and not (noted and steady.unscaled(self, optimizer)):
                    ended(self, optimizer, completed)

        return unscale_

    return make


def scaler_step(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("GradScaler.step", agent.updates.scaler_step_begins)
    ends = agent.guard("end of GradScaler.step", agent.loop.scaler_step_ends)
    failed = agent.guard("failure of GradScaler.step", agent.observing.diagnoser.scaler_step_failed)
    swallows = agent.guard_steering(
        "steering at GradScaler.step", agent.steering.swallows_scaler_step
    )
    steady = agent.steady

    unscaled = agent.guard("what a skip has found", agent.observing.unscale_ends)
    calls = agent.observing.diagnoser.calls

    def end(scaler: Any, optimizer: Any, completed: bool) -> None:
        try:
            ends(scaler, optimizer, completed)
            if not completed:
                failed(scaler, optimizer)
        finally:
            loop.in_scaler_step = None

    def make(original: Any) -> Any:
        @wrapper(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                gate.steady
                and self._enabled
                and gate.thread == _ident()
                and steady.scaler_step_begins(self, optimizer)
            ):
                completed = False
                try:
                    result = original(self, optimizer, *args, **kwargs)
                    completed = True
                    return result
                finally:
                    if completed and gate.steady and steady.pending is not None:
                        loop.in_scaler_step = None
                    else:
                        # Raised, or the optimizer's step has not run: a skip.
                        if completed and gate.steady:
                            unscaled(self, optimizer, True)
                        end(self, optimizer, completed)
            if gate.passes():
                return original(self, optimizer, *args, **kwargs)
            if gate.steers and swallows(self, optimizer):
                return None
            if not self._enabled:
                return original(self, optimizer, *args, **kwargs)
            if loop.updating is optimizer:
                calls.append("scaler.step")
                loop.scaler, loop.scaled = self, True
                loop.in_scaler_step = loop.tracks.live[0]
            else:
                begins(self, optimizer)
            completed = False
            try:
                result = original(self, optimizer, *args, **kwargs)
                completed = True
                return result
            finally:
                end(self, optimizer, completed)

        return step

    return make


def update(agent: "Agent") -> Wrap:
    gate = agent.gate
    updated = agent.guard("GradScaler.update", agent.updates.scaler_updated)
    swallows = agent.guard_steering("steering at update", agent.steering.swallows_update)
    steer = agent.guard_steering("steering into update", agent.steering.update_begins)
    steered = agent.guard_steering("steering after update", agent.steering.update_ended)
    steady = agent.steady

    def make(original: Any) -> Any:
        @wrapper(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            new_scale = args[0] if args else kwargs.get("new_scale")
            if gate.steady and gate.thread == _ident():
                result = original(self, *args, **kwargs)
                if not self._enabled or (new_scale is None and steady.updated(self)):
                    return result
                if not gate.passes():
                    updated(self)
                return result
            if gate.steers and not gate.passes():
                # A scale that the script gives is its own wish, whatever window this is in.
                answer = swallows(self) if new_scale is None else False
                # None: it has failed, perhaps after the step that this belongs to was swallowed.
                if answer or (answer is None and not _has_checks(self)):
                    return None
                steer(self, new_scale)
            result = original(self, *args, **kwargs)
            if gate.steers and not gate.passes():
                steered(self, new_scale)
            if not gate.passes():
                updated(self)
            return result

        return update

    return make


def _has_checks(scaler: Any) -> bool:
    """Whether an update finds what it needs: some optimizer's gradients were looked at."""
    states = scaler._per_optimizer_states.values() if scaler._enabled else ()
    return not scaler._enabled or any(state["found_inf_per_device"] for state in states)


def state_loaded(agent: "Agent") -> Wrap:
    gate = agent.gate
    loaded = agent.guard("GradScaler.load_state_dict", agent.observing.diagnoser.scaler_loaded)
    steered = agent.guard_steering("steering at loaded state", agent.steering.scaler_loaded)

    def make(original: Any) -> Any:
        @wrapper(original)
        def load_state_dict(self: Any, state_dict: Any) -> Any:
            result = original(self, state_dict)
            if gate.steers and self._enabled and not gate.passes():
                steered(self)
            if not gate.passes():
                loaded(self)
            return result

        return load_state_dict

    return make


def clip_norm(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("clip_grad_norm_", agent.updates.clip_begins)
    steer = agent.guard_steering("steering at clip", agent.steering.swallows_clip)
    ends = agent.guard("end of clip_grad_norm_", agent.updates.clip_ends)
    steady = agent.steady

    def make(original: Any) -> Any:
        # `clip_grad_norm_(parameters, max_norm, norm_type)`, `_get_total_norm(tensors, norm_type)`.
        position = 2 if original.__name__ == "clip_grad_norm_" else 1

        @wrapper(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if (
                gate.steady
                and gate.thread == _ident()
                and (steady.updating or steady.clip_begins())
            ):
                norm = original(*args, **kwargs)
                kind = args[position] if len(args) > position else kwargs.get("norm_type", 2.0)
                if not steady.clip_ended(norm, kind):
                    ends(norm, kind)
                return norm
            if gate.passes():
                return original(*args, **kwargs)
            clip = None
            if gate.steers and position == 1:
                clip = steer(args[0] if args else kwargs["tensors"])
            if clip is not None:
                args, kwargs = _over(clip.tensors, args, kwargs)
                if clip.factor is not None:
                    return original(*args, **kwargs) * clip.factor
            if loop.updating is None:
                begins()
            norm = original(*args, **kwargs)
            ends(norm, args[position] if len(args) > position else kwargs.get("norm_type", 2.0))
            return norm

        return clip_grad_norm_

    return make


def _over(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a norm, with other tensors."""
    if args:
        return (tensors, *args[1:]), kwargs
    return args, {**kwargs, "tensors": tensors}


def _parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parameters of a clip, as a list, and its arguments with them in place of a generator."""
    given = args[0] if args else kwargs["parameters"]
    parameters = [given] if isinstance(given, torch.Tensor) else list(given)
    if args:
        return parameters, (parameters, *args[1:]), kwargs
    return parameters, args, {**kwargs, "parameters": parameters}


def clip_value(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("clip_grad_value_", agent.updates.clip_begins)
    swallows = agent.guard_steering("steering at a clip of values", agent.steering.swallows_values)
    steady = agent.steady

    def make(original: Any) -> Any:
        @wrapper(original)
        def clip_grad_value_(*args: Any, **kwargs: Any) -> Any:
            if gate.passes():
                return original(*args, **kwargs)
            if gate.steady and steady.values_clipped():
                return original(*args, **kwargs)
            if gate.steers:
                parameters, args, kwargs = _parameters(args, kwargs)
                if swallows([p.grad for p in parameters if p.grad is not None]):
                    return None
            begins()
            return original(*args, **kwargs)

        return clip_grad_value_

    return make
