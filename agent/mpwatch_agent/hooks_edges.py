"""Wrappers around what is no part of the loop but would be disturbed by us, or disturb us.

Compilers and tracers, modes that see every operation, pickled modules, closed descriptors.
`hooks` puts them on.
"""

import functools
import threading
from typing import TYPE_CHECKING, Any

from mpwatch_agent.wrapping import Wrap, wrapper

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_ident = threading.get_ident


def compile(agent: "Agent") -> Wrap:
    gate = agent.gate
    compiles = agent.guard("torch.compile", agent.roots.script_compiles)

    def make(original: Any) -> Any:
        @wrapper(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if not gate.passes():
                compiles(None)
            result = original(*args, **kwargs)
            if not gate.passes():
                compiles(result)
            return result

        return compile

    return make


def jit(agent: "Agent", name: str) -> Wrap:
    gate = agent.gate
    release = agent.guard(name, agent.roots.release)

    def make(original: Any) -> Any:
        @wrapper(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if not gate.passes():
                # Scripting compiles a module's hooks with it, and ours are not TorchScript.
                release(f"the script uses {name}")
            return original(*args, **kwargs)

        return traced

    return make


def mode(agent: "Agent") -> Wrap:
    gate = agent.gate

    def make(original: Any) -> Any:
        @wrapper(original)
        def __enter__(self: Any) -> Any:
            gate.modes = True
            if gate.steady and gate.thread == _ident():
                # It would see our readings.
                gate.leave()
            return original(self)

        return __enter__

    return make


def autocast(agent: "Agent", entered: Any) -> Wrap:
    gate = agent.gate

    def make(original: Any) -> Any:
        @wrapper(original)
        def __enter__(self: Any) -> Any:
            if not gate.passes():
                entered(self)
            return original(self)

        return __enter__

    return make


def closerange(agent: "Agent") -> Wrap:
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


def module_state(agent: "Agent") -> Wrap:
    clean = agent.guard("state of a module", agent.roots.without_hooks)

    def make(original: Any) -> Any:
        @wrapper(original)
        def __getstate__(self: Any) -> Any:
            state = original(self)
            if state.get("_forward_pre_hooks"):
                clean(state)
            return state

        return __getstate__

    return make
