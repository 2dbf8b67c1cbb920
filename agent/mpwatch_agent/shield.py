"""Keeps every failure of the agent away from the loop, and every hook away from Dynamo.

The one place that catches exceptions on the training path. A hook that fails is switched off by
itself and said once; exceptions that belong to the script (Ctrl+C, its own signal handlers) pass.
"""

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])
_clock = time.perf_counter
_is_compiling = torch.compiler.is_compiling
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
# What a callback of Dynamo's would do to our frames is prevented while our part runs.
_set_eval_frame: Callable[[Any], Any] = getattr(eval_frame, "set_eval_frame", lambda callback: None)


class Gate:
    """Whether hooks do anything at all; closed in forked children and after detaching.

    `own_s` is the agent's own time on the training thread since it was last taken, `sampled_s`
    the part of it for what is only done on sampled steps.
    """

    __slots__ = (
        "bound", "compiles", "leave", "modes", "open", "own_s", "sampled_s", "steady", "steers",
        "thread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.open = False
        # This process has taken its rank (or found that another one has it).
        self.bound = False
        # The script compiles: only then may a wrapper be reached by a trace.
        self.compiles = False
        # Some dispatch or function mode was entered: only then need one be looked for.
        self.modes = False
        # Something changes the loop because it was asked to (`steering`).
        self.steers = False
        # Steps are like each other and only noted (`steady`); whoever does more leaves that first.
        self.steady = False
        self.leave: Callable[[], bool] = bool
        # The thread of the watched loop, once a backward has shown it.
        self.thread: int | None = None
        self.own_s = 0.0
        self.sampled_s = 0.0

    def passes(self) -> bool:
        """Whether a hook is to do nothing: closed, compiling, or not the loop's thread."""
        if not self.open or (self.compiles and _is_compiling()):
            return True
        return self.thread is not None and self.thread != threading.get_ident()

    def elsewhere(self) -> bool:
        """Whether this is another thread than the watched loop's: its calls pass through."""
        return self.thread is not None and self.thread != threading.get_ident()


class Shield:
    """Makes guarded functions: nothing they raise reaches their caller."""

    def __init__(self, gate: Gate, on_failure: Callable[[str, str], None]) -> None:
        self._gate = gate
        self._on_failure = on_failure

    def guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, guarded: returns None when it fails, and does nothing ever after."""
        gate = self._gate
        alive = True

        def mpwatch_guarded(*args: Any) -> Any:
            nonlocal alive
            if not alive or gate.elsewhere():
                return None
            callback = _set_eval_frame(None) if gate.compiles else None
            start = _clock()
            try:
                if gate.steady:
                    gate.leave()
                if gate.modes and (_dispatch_modes() or _function_modes()):
                    # A mode of the script's sees its own operations, none of ours.
                    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                        return function(*args)
                return function(*args)
            except BaseException as error:
                if belongs_to_script(error):
                    raise
                alive = False
                # Text only: a kept exception would keep the frames and tensors it came through.
                self._report(name, f"{type(error).__name__}: {error}")
                return None
            finally:
                gate.own_s += _clock() - start
                if callback is not None:
                    _set_eval_frame(callback)

        return invisible_to_dynamo(mpwatch_guarded)

    def guard_steering(
        self, name: str, function: Callable[..., Any], abandon: Callable[[str], None]
    ) -> Callable[..., Any]:
        """As `guard`; a failure also gives the loop back to the script."""

        def steer(*args: Any) -> Any:
            try:
                return function(*args)
            except BaseException as error:
                if not belongs_to_script(error):
                    abandon(f"{name} failed: {type(error).__name__}: {error}")
                raise

        return self.guard(name, steer)

    def guard_part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Guard a part that is only called from guarded functions: its failure is its own.

        Time and the script's modes are the caller's matter.
        """
        alive = True

        def part(*args: Any) -> Any:
            nonlocal alive
            if not alive:
                return None
            try:
                return function(*args)
            except BaseException as error:
                if belongs_to_script(error):
                    raise
                alive = False
                self._report(name, f"{type(error).__name__}: {error}")
                return None

        return part

    def _report(self, name: str, text: str) -> None:
        try:
            self._on_failure(name, text)
        except Exception:
            # Saying that something failed must not fail the loop either.
            return


def under_compiled() -> bool:
    """Whether the script's own code that is running now was called by a compiled function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def belongs_to_script(error: BaseException) -> bool:
    """Ctrl+C, an exit, or whatever a signal handler of the script raised while we were running."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return True
    handlers = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        handlers.add(getattr(handler, "__code__", None))
        handlers.add(getattr(getattr(handler, "__func__", None), "__code__", None))
    handlers.discard(None)
    before: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in handlers or _was_given(frame, before):
            return True
        before.append(frame)
        trace = trace.tb_next
    return False


def _was_given(frame: FrameType, before: list[FrameType]) -> bool:
    """Whether `frame` runs with one of `before`, the frame it interrupted, as an argument.

    Only signal handlers are called like that, whatever kind of callable they are and whether or
    not they are still installed.
    """
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    flat = [item for value in values for item in (value if type(value) is tuple else (value,))]
    return any(item is earlier for item in flat for earlier in before)


def invisible_to_dynamo(function: _F) -> _F:
    """Tell Dynamo to run this frame as it is, and still to compile what it calls.

    Without it, after a graph break Dynamo would compile our wrapper as a frame of its own: the
    event would vanish and the user's count of graphs would change.
    """
    try:
        strategy = eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        )
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        # An older torch without this private interface: observed all the same, except below
        # compiled code, where Dynamo may compile the wrapper.
        return function
    return function


# Called from wrappers, where Dynamo would take it for a frame of the script's.
invisible_to_dynamo(Gate.elsewhere)
invisible_to_dynamo(Gate.passes)
