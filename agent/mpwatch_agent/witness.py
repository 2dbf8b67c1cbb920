"""Remembers how the open micro-batch's forward began, to run it again if its loss is not finite.

Holds the arguments by reference until the backward begins: they are the script's and alive anyway.
The names of modules come from the second run (`rerun`, `forward_trace`).
"""

import sys
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mpwatch_agent.device import at_once
from mpwatch_agent.forward_trace import Birth, ForwardTrace
from mpwatch_agent.held_inputs import all_tensors
from mpwatch_agent.rerun import RandomStates, autocast_like, refusal, undone
from mpwatch_agent.shield import Gate
from mpwatch_agent.verdicts import Findings

# Forwards that draw no random number, one after the other, before that is taken for granted, and
# how often it is looked at afterwards.
NO_DRAW, DRAW_EVERY = 3, 16
# Forwards are run again for the first so many losses that are not finite, then at most once in so
# many steps.
ALWAYS, THEN_EVERY = 3, 20
_new: Any = tuple.__new__
_random_state = torch.default_generator.get_state
_autocasts = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype


class State(NamedTuple):
    """Of a forward whose inputs are held: all it depends on, to be as it was or not run again."""

    random: RandomStates
    inputs: tuple[int, ...]
    weights: int


class Scene(NamedTuple):
    """One forward as it began: who, with what, with which random numbers and autocast.

    `random` is None where no forward so far has drawn a random number. `autocast` is its format,
    if it was on. `version` is that of the first argument, to see that it was changed in place;
    `state` is there where the inputs are held.
    """

    root: Any
    arguments: Any
    named: Any
    random: torch.Tensor | None
    autocast: torch.dtype | None
    version: int | None
    state: State | None


class Witness:
    """The forwards of the open micro-batch, the newest of each root."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._runs = 0
        self._last_run = 0
        self.scenes: dict[int, Scene] = {}
        # Whether the newest forward began under autocast.
        self.autocast = False
        # Of the device that the loop runs on; whether its inputs are held there.
        self.device = "cpu"
        self.holds = False
        # Whether forwards may draw random numbers, and how many in a row have not.
        self.draws = True
        self._undrawn = self._forwards = 0
        # Batches may be written to a file, to be replayed: each with its random state.
        self.keeps = False
        # The format of the autocast that we are asked to put around forwards.
        self.steered: torch.dtype | None = None

    def forward_begins(self, root: Any, arguments: Any, named: Any) -> None:
        """A training forward of a root (held weakly) begins: for every micro-batch, so lean."""
        first = arguments[0] if arguments else None
        forwards = self._forwards = self._forwards + 1
        # Not by the class, whose call would be one of Python.
        scene = (
            root,
            arguments,
            named,
            _random_state() if self.draws or self.keeps or forwards % DRAW_EVERY == 0 else None,
            _autocast_dtype(self.device) if _autocasts(self.device) else self.steered,
            first._version if type(first) is torch.Tensor else None,
            _state(root(), arguments, named) if self.holds else None,
        )
        self.scenes[id(root)] = _new(Scene, scene)

    def backward_begins(self) -> list[Scene]:
        """The backward begins: the forwards are over, and nothing of them is held any more."""
        if not self.scenes:
            return []
        scenes, self.scenes = list(self.scenes.values()), {}
        self.autocast = scenes[-1].autocast is not None
        before = scenes[0].random
        if before is not None and self._undrawn >= 0:
            self._look_for_draws(before)
        return scenes

    def _look_for_draws(self, before: torch.Tensor) -> None:
        if not torch.equal(before, _random_state()):
            # Once is for good: what draws now and then is not to be missed.
            self._undrawn, self.draws = -1, True
            return
        self._undrawn += 1
        self.draws = self._undrawn < NO_DRAW

    def findings(self, scenes: list[Scene], step: int) -> Findings:
        """What running these forwards again shows; the loss they led to was not finite."""
        found = Findings(bad_loss=True)
        if self._runs >= ALWAYS and step - self._last_run < THEN_EVERY:
            found.forward = "the loss was not finite before the backward began, as before"
            return found
        self._runs += 1
        self._last_run = step
        found.forward = "the loss was not finite, and no forward of a root was seen"
        for scene in scenes:
            self._look_again(scene, found)
            if found.forward_where or found.bad_batch:
                break
        return found

    def _look_again(self, scene: Scene, found: Findings) -> None:
        root = scene.root()
        if root is None:
            return
        why = refusal(root, self._gate.compiles) or _changed(scene, root) or _elsewhere(scene, root)
        if not why:
            try:
                tell(found, self.again(scene, root), _FINITE_AGAIN)
                return
            except Exception as error:
                # Text only: an exception kept would keep the frames of the script's forward.
                why = f"run again it raised {type(error).__name__}"
        found.forward = f"the loss was not finite before the backward began; {why}"

    def again(self, scene: Scene, root: nn.Module) -> ForwardTrace:
        """Run the forward of `scene` again, traced, and leave nothing of it."""
        trace = ForwardTrace(root)
        trace.look_at_inputs((scene.arguments, scene.named))
        state = None if scene.autocast is None else (True, scene.autocast)
        autocast = autocast_like(state, self.device)
        random = RandomStates(scene.random) if scene.state is None else scene.state.random
        with undone(root, random), autocast():
            # Our hooks see this call as well; the gate is closed to it.
            self._gate.open = False
            try:
                trace.run(lambda: root(*scene.arguments, **(scene.named or {})))
            finally:
                self._gate.open = True
        return trace


class Trace(Protocol):
    """What tracing a forward showed: `ForwardTrace`, or `armed_trace.Seen`."""

    @property
    def birth(self) -> Birth | None: ...
    @property
    def bad_input(self) -> str: ...
    @property
    def bad_output(self) -> bool: ...


_FINITE_AGAIN = (
    "the model's output was finite when its forward was run again: the loss is made of it outside"
    " the model, or it did not happen again"
)


def tell(found: Findings, trace: Trace, finite: str) -> None:
    """Put what `trace` shows into `found`; `finite` in words where it shows nothing."""
    birth = trace.birth
    found.bad_batch = trace.bad_input
    if birth is not None:
        found.forward_where = birth.module
        if birth.bad_weight:
            found.bad_weights = f"{birth.module}: {birth.words()}"
        found.forward = birth.words()
    elif trace.bad_output:
        found.forward = "the model's output was not finite"
    elif not trace.bad_input:
        found.forward = finite


def _state(root: nn.Module | None, arguments: Any, named: Any) -> State | None:
    """None where the loss will be known in time, and nothing need be held."""
    first = None if root is None else next(root.parameters(), None)
    if root is None or first is None or at_once(first):
        return None
    return State(RandomStates(), _versions((arguments, named)), _version_of_weights(root))


def _versions(arguments: Any) -> tuple[int, ...]:
    return tuple(t._version for t in all_tensors(arguments) if not t.is_inference())


def _version_of_weights(root: nn.Module) -> int:
    return sum(parameter._version for parameter in root.parameters())


def _changed(scene: Scene, root: nn.Module) -> str:
    state = scene.state
    if state is not None:
        if state.inputs != _versions((scene.arguments, scene.named)):
            return "its input has been changed in place since, so it is not run again"
        if state.weights != _version_of_weights(root):
            return "its weights have been changed since, so it is not run again"
        return ""
    if scene.version is not None and scene.arguments[0]._version != scene.version:
        return "its input has been changed in place since, so it is not run again"
    return ""


def _elsewhere(scene: Scene, root: nn.Module) -> str:
    first = next(root.parameters(), None)
    if first is not None and scene.state is None and not at_once(first):
        return "on a device its forward is not run again"
    if "torch._dynamo" in sys.modules and torch.compiler.is_compiling():
        return "it is being compiled"
    return ""
