"""Another precision for a script that knows of none: autocast, loss scaling, 16-bit weights.

Owns when the mode is on and why it is not: refused by name where it would silently do nothing or
would be wrong. The numbers belong to `scaling` and `in_flight`, the weights to `half_copies`.
"""

import gc
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.events import PrecisionApplied, PrecisionRefused
from mpwatch.vocabulary import clean_text
from mpwatch_agent import casting
from mpwatch_agent.in_flight import GradientsInFlight
from mpwatch_agent.leaves import LeafWatch
from mpwatch_agent.owners import Owners
from mpwatch_agent.replaced_scaler import replaced_event
from mpwatch_agent.root_forwards import RootForwards
from mpwatch_agent.scale_reports import ScaleReports
from mpwatch_agent.scaler_presets import PRESETS, Policy
from mpwatch_agent.scaling import LossScaler
from mpwatch_agent.steering import Arguments, Part

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent

_graph_task = torch._C._current_graph_task_id
_CLOSURE = "an optimizer's step takes a closure, whose backwards run inside it"
_OWN_SCALER = "the script has a GradScaler of its own, and --scaler was not given"
_SHARDED = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


class Precision(Part):
    """One mode for all roots of the script. The first forward decides, the first backward says.

    `policy` is the scaler asked for, None where none was: then fp16 is scaled as torch does it.
    """

    order = 1

    def __init__(self, agent: "Agent", mode: str, dtype: str | None, policy: Policy | None) -> None:
        self._agent = agent
        self._loop = agent.loop
        self._mode = mode
        self._dtype = dtype
        self._policy = policy
        # "waiting" for a first backward, then "on"; "off" for good.
        self.state = "waiting"
        self.flight: GradientsInFlight | None = None
        self.forwards = RootForwards(agent, mode, self.give_back)
        self._later = ""
        self._closures = False
        self._looked_for_scaler = False
        self._script_scales = False

    # --- roots ------------------------------------------------------------------------------

    def root_found(self, module: Any, within_call: bool) -> None:
        if self.state == "off":
            return
        refusal = self._unfit(module)
        if not refusal and not self._looked_for_scaler:
            refusal = self._look_for_scaler()
        if refusal:
            self.give_back(refusal)
            return
        device = next((p.device.type for p in module.parameters()), "cpu")
        if self._dtype is None:
            self._dtype = self._usual_dtype(device)
        if self._dtype == "fp16" and self.flight is None and not self._script_scales:
            if self._closures:
                self.give_back(_CLOSURE)
                return
            self._begin_scaling()
        self.forwards.hook(module, self._dtype, device, within_call)

    def _unfit(self, module: Any) -> str:
        name = type(module).__name__
        halves = {p.dtype for p in module.parameters()} & casting.HALVES
        if halves:
            return f"weights of {name} are {halves.pop()} already"
        changes_weights = self._mode in ("O2", "O3")
        if changes_weights and self._agent.gate.compiles:
            return f"{self._mode} changes weights under a graph that the script compiles"
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if changes_weights and kinds & _SHARDED:
            return f"{self._mode} is not built for weights that {name} synchronises"
        return ""

    def _look_for_scaler(self) -> str:
        """Why a GradScaler of the script's speaks against this, before its first use shows it."""
        self._looked_for_scaler = True
        kinds = [torch.amp.GradScaler]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
        # Instances refer to their class. By type: asking a lazy proxy for its class could import.
        found = [o for o in gc.get_referrers(*kinds) if type(o) in kinds]
        if not any(scaler._enabled for scaler in found):
            return ""
        self._script_scales = self._policy is not None
        return "" if self._script_scales else _OWN_SCALER

    def _usual_dtype(self, device: str) -> str:
        if self._policy is not None:
            return "fp16"
        if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return "fp16"
        return "bf16"

    def _begin_scaling(self) -> None:
        agent = self._agent
        scaler = LossScaler(self._policy or PRESETS["torch"])
        told = ScaleReports(agent, scaler).decided
        self.flight = GradientsInFlight(self._loop, agent.steering.skipping, scaler, told)

    def roots_lost(self, reason: str) -> None:
        if self.forwards.plain:
            # Hooks on a plain module would be traced into the script's graphs.
            self.give_back(reason)

    # --- backward ---------------------------------------------------------------------------

    def backward_begins(self, arguments: Arguments) -> Arguments:
        if self.state == "off":
            return arguments
        # A forward may have been left by KeyboardInterrupt and the like.
        self.forwards.leave()
        if self.state == "waiting":
            if not self.forwards.count:
                self.give_back(self._no_root())
                return arguments
            self._say_applied(self._unowned(arguments))
        refusal = "" if self.flight is None else self._unscalable()
        if refusal:
            self.give_back(refusal)
            return arguments
        return arguments if self.flight is None else self.flight.backward_begins(arguments)

    def _unscalable(self) -> str:
        windows = self._loop.windows
        if windows.stepping:
            return "a backward runs inside an optimizer's step"
        if windows.banks and len(self._loop.tracks.live) > 1:
            return "windows of several optimizers are accumulated, which may end apart"
        return ""

    def _no_root(self) -> str:
        notes = "".join(f"; {note}" for note in self._agent.roots.notes)
        if not self._loop.tracks.live:
            return "no optimizer was made before the first backward, so no model is known to cast"
        return (
            "no model's forward was seen from outside before the first backward"
            " (model.compile(), called only inside compiled code, or not as model(...)?)" + notes
        )

    def _unowned(self, arguments: Arguments) -> list[str]:
        """A leaf whose gradient will carry the scale for good, looked for in the first backward."""
        if self.flight is None or self._mode == "O2":
            # (Copies of weights are nobody's either.)
            return []
        args, kwargs = arguments
        tensors = args[0] if args else kwargs.get("tensors")
        roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
        reason = LeafWatch().look(roots, None, Owners(self._loop.tracks).leaves())
        return [] if reason is None else [f"{reason}: that gradient carries the loss scale"]

    def _say_applied(self, notes: list[str]) -> None:
        self.state = "on"
        notes = notes + [
            f"{name} outputs are left in {self._dtype}" for name in sorted(self.forwards.left)
        ]
        policy = None if self.flight is None else self.flight.scaler.policy.name
        if self._policy is not None and policy is None:
            notes.append(
                f"{self._dtype} needs no loss scaling: scaler {self._policy.name} is unused"
            )
        if self._mode == "O3":
            notes.append(self._warning_o3())
        event = PrecisionApplied(
            mode=self._mode,
            dtype=self._dtype or "",
            scaler=policy,
            loss_scale=None if self.flight is None else self.flight.scaler.scale,
            roots=self._agent.roots.names(),
            notes=tuple(clean_text(note, 300) for note in notes),
        )
        self._agent.tell_at_once(event)
        if self.flight is not None:
            # By which rules, with which knobs.
            self._agent.tell_at_once(replaced_event(self.flight.scaler, "", self._agent.loop.steps))
        for note in notes:
            self._agent.say(f"precision {self._mode}: {note}")

    def _warning_o3(self) -> str:
        ulp = "2^-11" if self._dtype == "fp16" else "2^-8"
        return (
            f"weights and optimizer state are {self._dtype}: an update below |w| x {ulp} is lost"
            " and small squares in optimizer state round to zero; O2 keeps fp32 masters"
        )

    def backward_ended(self, completed: bool) -> None:
        self.forwards.move_gradients()
        if self.flight is not None and self.state == "on":
            self.flight.backward_ended()
        if self._later:
            later, self._later = self._later, ""
            self.give_back(later)

    # --- step -------------------------------------------------------------------------------

    def gradients_whole(self, optimizer: Any) -> None:
        flight = self.flight
        if self.state == "waiting" and _has_gradients(optimizer):
            # Gradients, and no backward made them: autograd.grad, which is not scaled.
            if not self.forwards.count:
                self.give_back(self._no_root())
            elif flight is None:
                self._say_applied([])
            else:
                self.give_back("gradients come from autograd.grad, which is not scaled")
        if self.state != "on" or flight is None or self._later:
            return
        if not flight.speaks_for(optimizer):
            if _has_gradients(optimizer):
                self.give_back("an optimizer steps on gradients that no scaled backward made")
            return
        # Faults edit gradients on purpose; accumulated ones are watched where they are gathered.
        ours = self._agent.faults is not None or self._loop.windows.banks
        if flight.carried is not None and not ours and flight.edited():
            self.give_back(
                "the script changes gradients between backward and step, while they are scaled;"
                " that step was skipped",
                skip=True,
            )
            return
        flight.decide(optimizer)

    def swallows_step(self, optimizer: Any, arguments: Arguments) -> bool:
        self.step_called(optimizer, arguments)
        return False

    def step_called(self, optimizer: Any, arguments: Arguments) -> None:
        args, kwargs = arguments
        closure = (args and callable(args[0])) or callable(kwargs.get("closure"))
        self._closures = self._closures or closure
        if self.state == "off" or self.flight is None:
            return
        if closure:
            self.give_back(_CLOSURE)
        elif _graph_task() != -1:
            self._later = "an optimizer steps inside the backward"
            self.flight.land_one(optimizer)

    # --- the end of it ------------------------------------------------------------------------

    def scale_begins(self, scaler: Any) -> None:
        if self._policy is None:
            self.give_back(_OWN_SCALER)
        elif self.flight is not None and self.state != "off":
            # The script scales by itself, by the policy that was asked for.
            flight, self.flight = self.flight, None
            flight.land(skip=False)

    def loop_known(self) -> None:
        if self.state == "waiting":
            self.give_back("no backward was seen")

    def give_back(self, reason: str, *, skip: bool = False) -> None:
        """The loop is the script's own again; said with `reason`."""
        if self.state == "off":
            return
        was, self.state = self.state, "off"
        was_on = was == "on" or self.forwards.count > 0
        try:
            self.forwards.release()
        finally:
            try:
                self._stop_scaling(skip)
            finally:
                self._say_refused(clean_text(reason, 300), was_on)

    def _say_refused(self, reason: str, was_on: bool) -> None:
        said = "given back" if was_on else "refused"
        self._agent.say(f"precision {self._mode} {said}: {reason}")
        self._agent.tell_at_once(
            PrecisionRefused(
                mode=self._mode, reason=reason, after_step=self._loop.steps, was_on=was_on
            )
        )

    def _stop_scaling(self, skip: bool) -> None:
        loop = self._loop
        loop.steered_scale, loop.looked_at_gradients = None, False
        if self.flight is not None:
            self.flight.land(skip=skip)
            if not skip:
                self.flight = None

    def carried_scale(self) -> float | None:
        return None if self.flight is None else self.flight.carried

    def abandon(self, reason: str) -> None:
        self.give_back(reason)


def _has_gradients(optimizer: Any) -> bool:
    groups = optimizer.param_groups
    return any(p.grad is not None for group in groups for p in group["params"])
