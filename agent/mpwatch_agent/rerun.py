"""Runs a forward again and leaves nothing of it: random numbers, buffers, attributes, output.

Only where that can be promised: an eager root on one process. What a forward changes elsewhere (a
file, a global of the script's) cannot be taken back; so it is run again only after a loss was not
finite, and not often. Called by `witness`.
"""

import contextlib
import io
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mpwatch_agent.shield import Gate

_KEPT_CONTAINERS = (list, dict, set, deque)


@contextlib.contextmanager
def undone(root: nn.Module, states: "RandomStates") -> Iterator[None]:
    """Within, `root` may run with the random numbers of `states`; after, it never has."""
    now = RandomStates()
    modules = [(module, _attributes(module)) for module in root.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        states.restore()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout, sys.stderr = streams
        for module, attributes in modules:
            _put_back(module, attributes)
        for buffer, before in buffers:
            # `.data` leaves the version alone: a graph that saved the buffer stays valid.
            buffer.data.copy_(before)
        now.restore()


class RandomStates:
    """The states of every random stream a forward may draw from, as they are now."""

    def __init__(self, torch_state: torch.Tensor | None = None) -> None:
        self.torch = torch.default_generator.get_state() if torch_state is None else torch_state
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy: Any = None if numpy is None else numpy.random.get_state()
        self.cuda: list[torch.Tensor] = []
        cuda: Any = torch.cuda
        if cuda.is_available() and cuda.is_initialized():
            self.cuda = torch.cuda.get_rng_state_all()

    def restore(self) -> None:
        """Make every stream go on from here."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def refusal(root: nn.Module, compiles: bool) -> str:
    """Why this root must not be run again; "" where it may."""
    if compiles or getattr(root, "_compiled_call_impl", None) is not None:
        return "the script compiles: its forward is not run again"
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return "a forward of several processes may communicate: it is not run again"
    if isinstance(root, torch.jit.ScriptModule):
        return "a scripted module is not run again"
    return ""


def refusal_of_hooks(root: nn.Module, gate: Gate) -> str:
    """Why no hooks may be on the modules of this root for the length of a forward; "" if so."""
    if gate.compiles or gate.modes or torch.compiler.is_compiling():
        return "the script compiles, or sees every operation by a mode of its own"
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "a graph is being captured"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it runs within a transform"
    return ""


Attributes = tuple[dict[str, Any], list[tuple[Any, Any]]]


def _attributes(module: nn.Module) -> Attributes:
    """A module's attributes, and copies of the plain containers among them (hooks are ours)."""
    held = dict(module.__dict__)
    copies = [
        (value, value.copy())
        for name, value in held.items()
        if type(value) in _KEPT_CONTAINERS and not name.endswith("_hooks")
    ]
    # The registries torch keeps: a buffer assigned anew lives in one of them.
    return held, copies


def _put_back(module: nn.Module, attributes: Attributes) -> None:
    held, copies = attributes
    module.__dict__.clear()
    module.__dict__.update(held)
    for container, before in copies:
        if type(container) is dict or type(container) is set:
            container.clear()
            container.update(before)
        else:
            container.clear()
            container.extend(before)


def autocast_like(state: tuple[bool, torch.dtype] | None, device: str) -> Callable[[], Any]:
    """The autocast of the first run, without its cache of weights."""
    if state is None or not state[0]:
        return contextlib.nullcontext
    return lambda: torch.autocast(device, dtype=state[1], cache_enabled=False)
