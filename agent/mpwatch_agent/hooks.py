"""Every wrapper that goes around a function of torch, in one table.

Each is thin and the same: a flag test, our guarded part, the original outside every `try` of
ours, our guarded part again. The wrappers carry the originals' names; a traceback of the script
shows one frame of this file where the script passed through one.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

from mpwatch_agent.patches import PatchTable
from mpwatch_agent.shield import invisible_to_dynamo

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_clock = time.perf_counter
_is_compiling = torch.compiler.is_compiling
# -1 outside every backward; a nested one (reentrant checkpointing) is no backward of the script's.
_graph_task = torch._C._current_graph_task_id
Wrap = Callable[[Any], Any]
# Scaled losses that no backward has used: kept no longer than this, they hold graphs.
MAX_UNSCALED = 16


def install(table: PatchTable, agent: "Agent") -> list[str]:
    """Put every hook on; returns the names this version of torch does not have."""
    grad_scaler = torch.amp.GradScaler
    optimizer = torch.optim.Optimizer
    iterator = dataloader._BaseDataLoaderIter
    clip_grad = torch.nn.utils.clip_grad
    # Inside the clip where this torch allows it: around it, a warning would name our frame.
    norm = "_get_total_norm" if "_get_total_norm" in vars(clip_grad) else "clip_grad_norm_"
    places: list[tuple[Any, str, Wrap]] = [
        (torch.autograd, "backward", _backward(agent)),
        (optimizer, "__init__", _optimizer_made(agent)),
        (optimizer, "profile_hook_step", _profile_hook_step(agent)),
        (optimizer, "zero_grad", _zero_grad(agent)),
        (torch.nn.Module, "zero_grad", _module_zero_grad(agent)),
        (torch.nn.Module, "__getstate__", _module_state(agent)),
        (grad_scaler, "scale", _scale(agent)),
        (grad_scaler, "unscale_", _unscale(agent)),
        (grad_scaler, "step", _scaler_step(agent)),
        (grad_scaler, "update", _update(agent)),
        (clip_grad, norm, _clip_norm(agent)),
        (clip_grad, "clip_grad_value_", _clip_value(agent)),
        (iterator, "__next__", _loader_next(agent)),
        (torch, "compile", _compile(agent)),
        (torch.jit, "script", _jit(agent, "torch.jit.script")),
        (torch.jit, "trace", _jit(agent, "torch.jit.trace")),
        (torch.export, "export", _jit(agent, "torch.export.export")),
        (os, "closerange", _closerange(agent)),
        (TorchDispatchMode, "__enter__", _mode(agent)),
        (TorchFunctionMode, "__enter__", _mode(agent)),
    ]
    missing = [name for owner, name, make in places if not table.replace(owner, name, make)]
    for name in {"clip_grad_norm_", "clip_grad_value_"} & {place[1] for place in places}:
        table.put(torch.nn.utils, name, vars(clip_grad)[name])
    return missing


def _wrapper(original: Any) -> Callable[[Any], Any]:
    """Decorate a wrapper so that it looks like `original` and Dynamo leaves its frame alone."""

    def decorate(function: Any) -> Any:
        return invisible_to_dynamo(functools.wraps(original)(function))

    return decorate


def _backward(agent: "Agent") -> Wrap:
    gate, loop = agent.gate, agent.loop
    bind = agent.guard("binding at a backward", agent.bind)
    claim = agent.guard("claim of the loop's thread", agent.claim_thread)
    disturbed = agent.faults is not None
    begins = agent.guard("backward", agent.backward_begins if disturbed else loop.backward_begins)
    ends = agent.guard("end of backward", agent.backward_ends if disturbed else loop.backward_ends)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if (
                not gate.open
                or gate.elsewhere()
                or (gate.compiles and _is_compiling())
                or _graph_task() != -1
            ):
                return original(*args, **kwargs)
            if gate.thread is None:
                claim()
            if not gate.bound:
                bind()
            begins(args[0] if args else kwargs.get("tensors"))
            completed = False
            try:
                result = original(*args, **kwargs)
                completed = True
                return result
            finally:
                if loop.lazy and not loop.windows.stepping:
                    # The next hook does the rest, with caches warm for both.
                    loop.ended_at, loop.ended_well = _clock(), completed
                else:
                    try:
                        ends(completed)
                    finally:
                        loop.windows.in_backward = False

        return backward

    return make


def _optimizer_made(agent: "Agent") -> Wrap:
    gate = agent.gate
    made = agent.guard("Optimizer.__init__", agent.optimizer_made)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                made(self)

        return __init__

    return make


def _profile_hook_step(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("Optimizer.step", agent.step_begins)
    ends = agent.guard("end of Optimizer.step", agent.step_ends)

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def profile_hook_step(func: Any) -> Any:
            hooked = original(func)

            @_wrapper(hooked)
            def step(*args: Any, **kwargs: Any) -> Any:
                if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                    return hooked(*args, **kwargs)
                stepping = loop.windows.stepping
                completed = False
                try:
                    if loop.updating is args[0]:
                        loop.tracks.live[0].depth += 1
                        loop.windows.stepping += 1
                    else:
                        begins(args[0])
                    result = hooked(*args, **kwargs)
                    completed = True
                    return result
                finally:
                    try:
                        ends(args[0], completed)
                    finally:
                        # Whatever was interrupted where, nothing is left half counted.
                        loop.step_left(stepping)

            step.mpwatch_sees = True
            return step

        return profile_hook_step

    return make


def _zero_grad(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    act = agent.guard("command at zero_grad", agent.act)
    cleared = agent.guard("Optimizer.zero_grad", loop.optimizer_cleared)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                return original(self, *args, **kwargs)
            if not (loop.windows.roots_seen or loop.loader_seen):
                stop = act()
                if stop is not None:
                    raise stop
            result = original(self, *args, **kwargs)
            if loop.windows.clears_by_hook and loop.at_rest():
                return result
            cleared(self)
            return result

        return zero_grad

    return make


def _module_zero_grad(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    act = agent.guard("command at zero_grad of a module", agent.act)
    look = agent.guard("probes", loop.probes)
    cleared = agent.guard("Module.zero_grad", loop.windows.module_cleared)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                return original(self, *args, **kwargs)
            if not (loop.windows.roots_seen or loop.loader_seen):
                stop = act()
                if stop is not None:
                    raise stop
            if loop.windows.clears_by_hook and loop.at_rest():
                return original(self, *args, **kwargs)
            before = look()
            result = original(self, *args, **kwargs)
            if before:
                cleared(before)
            return result

        return zero_grad

    return make


def _scale(agent: "Agent") -> Wrap:
    gate, loop = agent.gate, agent.loop
    several = agent.guard("GradScaler.scale", loop.losses_scaled)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def scale(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if self._enabled and gate.open and not gate.elsewhere():
                loop.scaler = self
                loop.scaled = loop.still_scaled = True
                if len(loop.unscaled) > MAX_UNSCALED:
                    loop.unscaled.clear()
                if type(outputs) is torch.Tensor:
                    # Kept until the backward that follows, which reads the value of it.
                    loop.unscaled[id(result)] = (result, outputs)
                else:
                    several(outputs, result)
            return result

        return scale

    return make


def _unscale(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("GradScaler.unscale_", agent.unscale_begins)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def unscale_(self: Any, optimizer: Any) -> Any:
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                begins(self, optimizer)
            return original(self, optimizer)

        return unscale_

    return make


def _scaler_step(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("GradScaler.step", agent.scaler_step_begins)
    ends = agent.guard("end of GradScaler.step", agent.loop.scaler_step_ends)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                return original(self, optimizer, *args, **kwargs)
            if loop.updating is optimizer and self._enabled:
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
                try:
                    ends(self, optimizer, completed)
                finally:
                    loop.in_scaler_step = None

        return step

    return make


def _update(agent: "Agent") -> Wrap:
    gate = agent.gate
    updated = agent.guard("GradScaler.update", agent.scaler_updated)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                updated(self)
            return result

        return update

    return make


def _clip_norm(agent: "Agent") -> Wrap:
    gate = agent.gate
    loop = agent.loop
    begins = agent.guard("clip_grad_norm_", agent.clip_begins)
    ends = agent.guard("end of clip_grad_norm_", agent.clip_ends)

    def make(original: Any) -> Any:
        # `clip_grad_norm_(parameters, max_norm, norm_type)`, `_get_total_norm(tensors, norm_type)`.
        position = 2 if original.__name__ == "clip_grad_norm_" else 1

        @_wrapper(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                return original(*args, **kwargs)
            if loop.updating is None:
                begins()
            norm = original(*args, **kwargs)
            ends(norm, args[position] if len(args) > position else kwargs.get("norm_type", 2.0))
            return norm

        return clip_grad_norm_

    return make


def _clip_value(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("clip_grad_value_", agent.clip_begins)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def clip_grad_value_(*args: Any, **kwargs: Any) -> Any:
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                begins()
            return original(*args, **kwargs)

        return clip_grad_value_

    return make


def _loader_next(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("DataLoader", agent.loader_begins)
    ends = agent.guard("end of DataLoader", agent.loop.loader_ends)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def __next__(self: Any) -> Any:
            if not gate.open or gate.elsewhere() or (gate.compiles and _is_compiling()):
                return original(self)
            stop = begins()
            if stop is not None:
                raise stop
            batch = None
            try:
                batch = original(self)
                return batch
            finally:
                ends(batch)

        return __next__

    return make


def _compile(agent: "Agent") -> Wrap:
    gate = agent.gate
    compiles = agent.guard("torch.compile", agent.roots.script_compiles)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                compiles(None)
            result = original(*args, **kwargs)
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                compiles(result)
            return result

        return compile

    return make


def _jit(agent: "Agent", name: str) -> Wrap:
    gate = agent.gate
    release = agent.guard(name, agent.roots.release)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if gate.open and not gate.elsewhere() and not (gate.compiles and _is_compiling()):
                # Scripting compiles a module's hooks with it, and ours are not TorchScript.
                release(f"the script uses {name}")
            return original(*args, **kwargs)

        return wrapper

    return make


def _mode(agent: "Agent") -> Wrap:
    gate = agent.gate

    def make(original: Any) -> Any:
        @_wrapper(original)
        def __enter__(self: Any) -> Any:
            gate.modes = True
            return original(self)

        return __enter__

    return make


def _closerange(agent: "Agent") -> Wrap:
    gate = agent.gate
    leave = agent.guard("os.closerange", agent.descriptors_close)

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def closerange(fd_low: int, fd_high: int, /) -> None:
            if gate.open:
                leave(fd_low, fd_high)
            original(fd_low, fd_high)

        return closerange

    return make


def _module_state(agent: "Agent") -> Wrap:
    clean = agent.guard("state of a module", agent.roots.without_hooks)

    def make(original: Any) -> Any:
        @_wrapper(original)
        def __getstate__(self: Any) -> Any:
            state = original(self)
            if state.get("_forward_pre_hooks"):
                clean(state)
            return state

        return __getstate__

    return make
