"""Root modules: found at the first training forward, then told apart from their submodules.

A root owns parameters of an optimizer and is called from outside. Only forward timing needs it,
so whatever could disturb the script wins: no hook stays on a plain module once the script
compiles, traces or scripts something; a compiled wrapper is hooked outside its graph.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpwatch_agent.loop import Loop
from mpwatch_agent.shield import Gate
from mpwatch_agent.windows import sizes_of

_clock = time.perf_counter
_ident = threading.get_ident
_is_compiling = torch.compiler.is_compiling

# Steps of the leading optimizer during which every module's forward is looked at.
SEARCH_STEPS = 2

Begins = Callable[[float, bool, Any], BaseException | None]


class RootHook:
    """The pre-hook on one root. Pickles to something harmless, copies to itself."""

    mpwatch_owns = True

    def __init__(self, module: nn.Module, roots: "Roots") -> None:
        self._module = weakref.ref(module)
        self._begins = roots.begins
        self._gate = roots.gate
        self._loop = roots.loop
        self._noted = roots.noted

    def __call__(self, module: nn.Module, arguments: Any, named: Any = None) -> None:
        gate, loop = self._gate, self._loop
        if gate.steady and gate.thread == _ident():
            noted = self._noted
            if noted is not None and noted(self._module, module, arguments, named):
                return
        # First, so that a trace through this module sees a constant and nothing of ours.
        # A deep copy (EMA, target network) carries this hook and is not the root.
        if (gate.compiles and _is_compiling()) or self._module() is not module or not gate.open:
            return
        # Another thread's, or a trace that would record our reading of shapes.
        if gate.elsewhere() or torch._C._is_tracing():
            return
        training = module.training and torch.is_grad_enabled()
        if training and loop.sees_forward is not None:
            loop.sees_forward(self._module, arguments, named)
        inside = loop.ended_at is not None or loop.windows.unstepped
        if training and inside and loop.lazy and loop.forward is None and not gate.modes:
            # Inside a window no command can act: note it, the backward's hook does the rest.
            first = arguments[0] if arguments else None
            if type(first) is torch.Tensor:
                loop.forward = (_clock(), True, sizes_of(first))
                return
        stop = self._begins(_clock(), training, arguments or named)
        if stop is not None:
            raise stop

    def __deepcopy__(self, memo: dict[int, Any]) -> "RootHook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # `nullcontext().__exit__` takes anything and returns None, without mpwatch installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class Roots:
    """Finds roots and holds the handles of their hooks.

    `begins(now, training, arguments)` is a guarded callback; it may return an exception that the
    script is to see (a stop at the boundary).
    """

    def __init__(
        self,
        begins: Begins,
        guard: Callable[[str, Callable[..., Any]], Callable[..., Any]],
        gate: Gate,
        loop: Loop,
    ) -> None:
        self.gate = gate
        self.loop = loop
        self.begins = begins
        # Told of a root's forward while steps are only noted, and says whether it was noted.
        self.noted: Callable[[Any, nn.Module, Any, Any], bool] | None = None
        self._look = guard("root search", self._consider)
        self._owned: set[int] = set()
        self._covered: set[int] = set()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._handles: list[tuple[bool, Any]] = []
        self._compiled: list[weakref.ref[nn.Module]] = []
        self._search: Any = None
        self._steps = 0
        # Told of each root, and of there being none to hook, where something steers the loop.
        self.found: Callable[[nn.Module, bool], None] | None = None
        self.lost: Callable[[str], None] | None = None
        self.notes: list[str] = []

    @property
    def searching(self) -> bool:
        """Whether every module's forward is looked at."""
        return self._search is not None

    def names(self) -> tuple[str, ...]:
        """Class names of the roots found."""
        return tuple(type(m).__name__ for m in (ref() for ref in self._roots) if m is not None)

    def first(self) -> nn.Module | None:
        """The first root that still lives."""
        return next((m for m in (ref() for ref in self._roots) if m is not None), None)

    def modules(self) -> list[nn.Module]:
        """The roots that still live."""
        return [module for module in (ref() for ref in self._roots) if module is not None]

    # --- search -----------------------------------------------------------------------------

    def optimizer_made(self, optimizer: Any) -> None:
        """Look for the module that owns this optimizer's parameters."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._owned |= owned
        self._steps = 0
        if owned <= self._covered:
            # Another optimizer on the same parameters, as some loops make one per epoch.
            return
        if self.gate.compiles:
            self._hook_compiled()
        elif self._search is None:
            hook = nn.modules.module.register_module_forward_pre_hook
            self._search = hook(self._on_any_forward)

    def step_seen(self) -> None:
        """A step of the leading optimizer: who has not been called by the second is no root."""
        self._steps += 1
        if self._steps >= SEARCH_STEPS:
            self.stop_search()

    def stop_search(self) -> None:
        """Take the hook on every module's forward away."""
        if self._search is not None:
            self._search.remove()
            self._search = None

    def _on_any_forward(self, module: nn.Module, arguments: Any) -> None:
        if _is_compiling():
            return
        stop = self._look(module, arguments)
        if stop is not None:
            raise stop

    def _consider(self, module: nn.Module, arguments: Any) -> BaseException | None:
        if not torch.is_grad_enabled() or not module.training:
            return None
        # The outermost module is called first; what it covers is no root by itself any more.
        mine = {id(p) for p in module.parameters()} & self._owned
        if not mine - self._covered:
            return None
        self._covered |= mine
        self._roots.append(weakref.ref(module))
        hooked = self._hook(module, plain=True)
        if self._covered >= self._owned:
            self.stop_search()
        if not hooked:
            # Its forwards are not seen: micro-batches are told apart by their backwards.
            return None
        # The hook just put on misses this very call.
        if self.loop.sees_forward is not None:
            self.loop.sees_forward(self._roots[-1], arguments, None)
        training = torch.is_grad_enabled() and module.training
        stop = self.begins(_clock(), training, arguments)
        if stop is None and self.found is not None and not _compiled_in_place(module):
            self.found(module, True)
        return stop

    # --- hooks on roots ---------------------------------------------------------------------

    def _hook(self, module: nn.Module, *, plain: bool) -> bool:
        if _compiled_in_place(module):
            self.notes.append(f"{type(module).__name__} is compiled in place: no forward times")
            if self.lost is not None:
                self.lost(f"{type(module).__name__} is compiled in place (model.compile())")
            return False
        if isinstance(module, nn.TransformerEncoderLayer):
            # In evaluation it takes another path, with other rounding, where a hook is on it.
            self.notes.append("a root that is an encoder layer: no forward times")
            if self.lost is not None:
                self.lost("the model is an encoder layer by itself, which a hook would change")
            return False
        before = RootHook(module, self)
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        self._handles.append((plain, handle))
        return True

    # --- compilation ------------------------------------------------------------------------

    def script_compiles(self, result: Any) -> None:
        """`torch.compile` was called: nothing of ours may stand where Dynamo could trace it."""
        if not self.gate.compiles:
            self.gate.compiles = True
            self.release("the script uses torch.compile")
        if isinstance(result, nn.Module):
            self._compiled.append(weakref.ref(result))
            if self._owned:
                self._hook_compiled()

    def _hook_compiled(self) -> None:
        for reference in self._compiled:
            module = reference()
            if module is None or any(root() is module for root in self._roots):
                continue
            if any(id(p) in self._owned for p in module.parameters()):
                self._roots.append(reference)
                self._hook(module, plain=False)
                if self.found is not None:
                    self.found(module, False)

    def release(self, reason: str) -> None:
        """Take every hook off plain modules, for good."""
        self.stop_search()
        # Without their hooks micro-batches are told apart by backwards alone.
        self.loop.windows.roots_seen = False
        had = [handle for plain, handle in self._handles if plain]
        for handle in had:
            handle.remove()
        self._handles = [(plain, handle) for plain, handle in self._handles if not plain]
        note = f"{reason}: no hook stays on plain modules, whose forward is timed from the data on"
        if note not in self.notes:
            self.notes.append(note)
        if self.lost is not None:
            self.lost(reason)

    def without_hooks(self, state: dict[str, Any]) -> None:
        """Take our hook out of a module's state that is being pickled or copied."""
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = state.get(kind) or {}
            ours = [key for key, hook in hooks.items() if getattr(hook, "mpwatch_owns", False)]
            names = [name for name in state if name.startswith(kind)] if ours else []
            for name in names:
                state[name] = type(state[name])(
                    (key, value) for key, value in state[name].items() if key not in ours
                )

    def remove(self) -> None:
        """Take everything off (detaching)."""
        self.stop_search()
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
