"""Wrappers around what brings gradients: the backward, and the data before it.

Thin and all the same: a flag test, our guarded part, the original outside every `try` of ours,
our guarded part again. `hooks` puts them on.
"""

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from mpwatch_agent.wrapping import Wrap, wrapper

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_clock = time.perf_counter
_ident = threading.get_ident
# -1 outside every backward; a nested one (reentrant checkpointing) is no backward of the script's.
_graph_task = torch._C._current_graph_task_id


def backward(agent: "Agent") -> Wrap:
    gate, loop = agent.gate, agent.loop
    bind = agent.guard("binding at a backward", agent.bind)
    claim = agent.guard("claim of the loop's thread", agent.claim_thread)
    disturbed = agent.faults is not None
    begins = agent.guard("backward", agent.backward_begins if disturbed else loop.backward_begins)
    ends = agent.guard("end of backward", agent.backward_ends if disturbed else loop.backward_ends)

    steady = agent.steady
    steer = agent.guard_steering("steering at backward", agent.steering.backward_begins)
    steered = agent.guard_steering("steering after backward", agent.steering.backward_ended)

    def make(original: Any) -> Any:
        @wrapper(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if (
                gate.steady
                and gate.thread == _ident()
                and _graph_task() == -1
                and steady.backward_begins(args[0] if args else kwargs.get("tensors"))
            ):
                completed = False
                try:
                    result = original(*args, **kwargs)
                    completed = True
                    return result
                finally:
                    try:
                        if not steady.backward_ended(completed):
                            ends(completed)
                    finally:
                        loop.windows.in_backward = False
            if gate.passes() or _graph_task() != -1:
                return original(*args, **kwargs)
            if gate.thread is None:
                claim()
            if not gate.bound:
                bind()
            begins(args[0] if args else kwargs.get("tensors"))
            if gate.steers:
                args, kwargs = steer(args, kwargs) or (args, kwargs)
            completed = False
            try:
                result = original(*args, **kwargs)
                completed = True
                return result
            finally:
                if gate.steers:
                    steered(completed)
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


def loader_next(agent: "Agent") -> Wrap:
    gate = agent.gate
    begins = agent.guard("DataLoader", agent.loader_begins)
    ends = agent.guard("end of DataLoader", agent.loop.loader_ends)
    steady = agent.steady

    def make(original: Any) -> Any:
        @wrapper(original)
        def __next__(self: Any) -> Any:
            if gate.steady and gate.thread == _ident() and steady.loader_begins():
                try:
                    return original(self)
                finally:
                    steady.loader_ends()
            if gate.passes():
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
