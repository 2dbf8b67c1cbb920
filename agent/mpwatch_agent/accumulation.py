"""Virtual accumulation: K windows of the script make one, without a change in the script.

Backwards are seeded with 1/K, K - 1 steps are swallowed and their gradients kept (`stash`), and
at the K-th script window everything is as in a loop that accumulates by hand. What cannot be done
exactly is refused by name: then all that is kept is applied at the next step and K is 1.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpwatch_agent import gradient_sync
from mpwatch_agent.clips import Clip, Clips
from mpwatch_agent.leaves import LeafWatch
from mpwatch_agent.loop import Loop
from mpwatch_agent.notices import Notices
from mpwatch_agent.open_window import OpenWindow, is_empty
from mpwatch_agent.owners import Owners
from mpwatch_agent.seeds import Seeds, Unseedable
from mpwatch_agent.shield import under_compiled
from mpwatch_agent.stash import parameters_of, scale_gradients
from mpwatch_agent.steering import Arguments, Part
from mpwatch_agent.tracks import OptimizerTrack


class Accumulation(Part):
    """K script windows per step. `said(reason)` is told once when K has to be 1."""

    def __init__(
        self, loop: Loop, k: int, said: Callable[[str], None], compiles: Callable[[], bool]
    ) -> None:
        self.k = k
        self.refused: str | None = None
        # Real windows seen so far, and what was seen that K > 1 would have to refuse.
        self.windows_watched = 0 if k == 1 else 2
        self.unfit: str | None = None
        self.notices = Notices(loop)
        self.at_first_forward: Callable[[], None] | None = None
        # Asked before each backward and each training forward: may change `k` at a boundary.
        self.at_window_start: Callable[[], None] | None = None
        # Calls of `torch.autograd.grad` since the last step of any optimizer.
        self.grads_taken = 0
        self.leaves = LeafWatch()
        self.owners = Owners(loop.tracks)
        self.clips = Clips(self, loop)
        self._loop = loop
        self._said = said
        self._compiles = compiles
        self._seeds = Seeds()
        self._windows: dict[int, OpenWindow] = {}
        # Numbers the outermost backwards; the newest one's seed while it runs.
        self._generation = 0
        self._seed_in_flight = 1
        # The newest backward came out of compiled code, where a step may come from as well.
        self._backward_compiled = False
        # Scalers of which an update belongs to a swallowed window: by unscale, by step.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        # Whether the last step of an optimizer, by its serial number, was swallowed, and how
        # many script windows it has had.
        self.last_swallowed: dict[int, bool] = {}
        self.script_windows: dict[int, int] = {}
        loop.windows.banks = True

    # --- what others ask ----------------------------------------------------------------------

    @property
    def gathering(self) -> bool:
        """Whether any window is between its first swallowed step and its real one."""
        return any(window.generations for window in self._windows.values())

    def will_swallow(self, optimizer: Any) -> bool:
        """Whether the step of the script window that is open now will be swallowed."""
        if self.k == 1 or self.refused is not None:
            return False
        window = self._windows.get(self._loop.tracks.of(optimizer).serial)
        gathered = 0 if window is None else len(window.generations)
        return gathered + 1 < self.k

    def window_of(self, optimizer: Any) -> OpenWindow | None:
        """The window that `optimizer` gathers, if it has one open."""
        return self._windows.get(self._loop.tracks.of(optimizer).serial)

    # --- backward -----------------------------------------------------------------------------

    def backward_begins(self, arguments: Arguments) -> Arguments:
        if self.refused is not None:
            self._settle_refused_backward()
        self._generation += 1
        self._backward_compiled = self._compiles() and under_compiled()
        windows = self._loop.windows
        if windows.stepping:
            return arguments  # a closure's: its step was refused
        self._settle_unfinished_updates()
        if self.at_window_start is not None and not windows.roots_seen:
            self.at_window_start()
        if self.k == 1 and self.refused is not None:
            return arguments
        try:
            self._look_at_leaves(arguments)
            if self.k == 1:
                return arguments
            seeded = self._seeds.divided(arguments, self.k)
        except Unseedable as error:
            self.refuse(str(error))
            return arguments
        self._seed_in_flight = self.k
        if self._loop.losses.half:
            self.notices.seeded()
        return seeded

    def backward_ended(self, completed: bool) -> None:
        if self.refused is not None:
            self._settle_refused_backward()
        self._seed_in_flight = 1
        if self.k > 1 and self.notices.looks:
            self.notices.backward_ended()

    def _settle_refused_backward(self) -> None:
        """A backward that was refused while it ran has ended: what it brought is the script's."""
        seed = self._seed_in_flight
        if self.refused is not None and seed != 1:
            self._seed_in_flight = 1
            for track in self._loop.tracks.live:
                self._give_back(track, seed)

    def _look_at_leaves(self, arguments: Arguments) -> None:
        args, kwargs = arguments
        inputs = args[5] if len(args) > 5 else kwargs.get("inputs")
        if inputs is None and not self.leaves.is_due():
            return
        tensors = args[0] if args else kwargs.get("tensors")
        roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
        reason = self.leaves.look(roots, inputs, self.owners.leaves())
        if reason is not None:
            self._found_unfit(reason)

    def _found_unfit(self, reason: str) -> None:
        """Refuse, or, while K is 1 and nothing is at stake, remember why K must stay 1."""
        if self.k > 1:
            self.refuse(reason)
        else:
            self.unfit = reason

    def _settle_unfinished_updates(self) -> None:
        """An update had begun (unscale, clip) and no step came before this backward."""
        for window in [*self._windows.values()]:
            optimizer = window.track.ref()
            if optimizer is None:
                del self._windows[window.track.serial]
            elif window.swallows is not None and not window.track.depth:
                if is_empty([p.grad for p in parameters_of(optimizer)]):
                    # Thrown away by the script; what was gathered before stays.
                    window.script_window_over()
                else:
                    self.refuse(
                        "gradients are unscaled or clipped before the window is complete",
                        more_comes=True,
                    )
                    return

    # --- update -------------------------------------------------------------------------------

    def swallows_unscale(self, scaler: Any, optimizer: Any) -> bool:
        if not scaler._enabled or not self.swallows(optimizer):
            return False
        self._windows[self._loop.tracks.of(optimizer).serial].unscaled = True
        self._unscaled.add(id(scaler))
        return True

    def swallows_clip(self, tensors: Any) -> Clip | None:
        return self.clips.over(tensors)

    def swallows_values(self, gradients: list[Any]) -> bool:
        clip = self.clips.over(gradients)
        return clip.factor is not None

    def forward_begins(self, arguments: Any) -> None:
        last = len(self._windows) == 0 and self.k == 1
        gradient_sync.before_forward((), needed=last)
        if self.at_first_forward is not None:
            begin, self.at_first_forward = self.at_first_forward, None
            begin()
        # The model's input wants a gradient: somebody will read it.
        first = arguments[0] if type(arguments) is tuple and arguments else arguments
        if isinstance(first, torch.Tensor) and first.requires_grad and first.is_leaf:
            self.leaves.suspect = True

    def swallows_average(self, model: Any) -> bool:
        """Whether an average over `model`'s weights would take in a window that is not over."""
        track = self.owners.of_model(model)
        return track is not None and self.step_swallowed(track)

    def step_swallowed(self, track: OptimizerTrack) -> bool:
        """Whether what follows the step of `track` once per update belongs to no update."""
        if track.has_fresh:
            return self.will_swallow(track.ref())
        return self.last_swallowed.get(track.serial, False)

    def swallows_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        if not scaler._enabled or not self.swallows(optimizer):
            return False
        self._stepped.add(id(scaler))
        return self._bank(optimizer)

    def swallows_update(self, scaler: Any) -> bool:
        if not scaler._enabled:
            return False
        key = id(scaler)
        stepped, unscaled = key in self._stepped, key in self._unscaled
        self._stepped.discard(key)
        self._unscaled.discard(key)
        for state in scaler._per_optimizer_states.values():
            if state["found_inf_per_device"]:
                return False
        if unscaled and not stepped:
            # The script found something wrong after unscale and wants the scale to follow.
            self.refuse("the script unscales, discards the window and updates the scale itself")
        return stepped or unscaled

    def swallows_step(self, optimizer: Any, arguments: Arguments) -> bool:
        loop = self._loop
        track = loop.tracks.of(optimizer)
        if track.depth or loop.in_scaler_step is track:
            return False
        if self.refused is None:
            reason = self._unsteppable(arguments)
            if reason is not None:
                self._found_unfit(reason)
        if self.refused is not None and loop.windows.in_backward and self._seed_in_flight != 1:
            # A step inside a backward that was seeded before it was known.
            scale_gradients(optimizer, self._seed_in_flight)
            return False
        return self.swallows(optimizer) and self._bank(optimizer)

    def _unsteppable(self, arguments: Arguments) -> str | None:
        args, kwargs = arguments
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return "the optimizer's step is given a closure"
        if self._loop.windows.in_backward:
            return "the optimizer steps inside the backward"
        if self._compiles() and under_compiled() and not self._backward_compiled:
            return "the optimizer's step is compiled"
        return None

    def gradients_whole(self, optimizer: Any) -> None:
        """The real update begins: what was kept joins the gradients, once."""
        window = self._windows.get(self._loop.tracks.of(optimizer).serial)
        if window is None or window.merged:
            return
        if self.swallows(optimizer):
            self.refuse("a step cannot be swallowed: its class was made before the hooks")
        if not window.merged:
            self._merge(window, optimizer)

    # --- one script window --------------------------------------------------------------------

    def swallows(self, optimizer: Any) -> bool:
        """Whether the script window of `optimizer` that ends now makes no update."""
        track = self._loop.tracks.of(optimizer)
        window = self._windows.get(track.serial)
        if self.refused is not None and not self._loop.windows.in_backward:
            self._settle_refused_backward()
        if window is None:
            if self.k == 1:
                return False
            window = self._windows[track.serial] = OpenWindow(track)
        if window.swallows is None:
            if self.refused is None:
                self.notices.update_begins(window)
            if self.refused is None and window.never_cleared():
                window.stash.clear()  # all of it is in the gradients already
                self.refuse("the script does not clear its gradients between steps")
            window.swallows = self.refused is None and len(window.generations) + 1 < self.k
            if self.refused is not None and not window.merged:
                self._merge(window, optimizer)
        return window.swallows

    def _bank(self, optimizer: Any) -> bool:
        """Keep the gradients of a script window whose step is swallowed; False: it is not."""
        loop = self._loop
        track = loop.tracks.of(optimizer)
        window = self._windows[track.serial]
        divisor = 1
        if not window.backwards():
            if not self.grads_taken and any(p.grad is not None for p in parameters_of(optimizer)):
                self.refuse("a step without a backward before it")
                return False
            divisor = self.k  # `autograd.grad` is not seeded
            self._generation += 1
        # Until all of it is done the gradients are in two places, and must not be added up.
        window.unsure = True
        window.follow_scale(loop.scaler if loop.scaled else None)
        window.stash.add(optimizer, divisor)
        window.banked(self._generation)
        track.multiplier = self.k
        self._script_window_over(track, swallowed=True)
        loop.swallowed(track)
        window.unsure = False
        return True

    def _merge(self, window: OpenWindow, optimizer: Any) -> None:
        """Add what was kept to the gradients of the last script window."""
        gathered = len(window.generations)
        backwards = window.backwards()
        if self.refused is None:
            self._generation += not backwards
            flaw = window.flaw(self.k, self._generation)
            if flaw is not None:
                self.refuse(flaw)
        window.follow_scale(self._loop.scaler if self._loop.scaled else None)
        window.unsure = True
        if not backwards and self.refused is None:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / self.k
        window.stash.merge(optimizer)
        if self.refused is not None and gathered:
            # Divided by what arrived, not by what was asked for.
            scale_gradients(optimizer, 1 / (gathered + bool(backwards)))
        window.merged, window.unsure = True, False

    def concluded(self, track: OptimizerTrack, optimizer: Any, draft: Any) -> None:
        """A real step is over, applied or skipped."""
        self._windows.pop(track.serial, None)
        self.windows_watched += track is self._loop.tracks.leader
        self._script_window_over(track, swallowed=False)

    def _script_window_over(self, track: OptimizerTrack, *, swallowed: bool) -> None:
        serial = track.serial
        self.last_swallowed[serial] = swallowed
        self.script_windows[serial] = self.script_windows.get(serial, 0) + 1
        self.grads_taken = 0

    def cleared(self, optimizer: Any) -> None:
        if self._windows:
            self._cleared(self._loop.tracks.of(optimizer))

    def module_cleared(self, module: Any) -> None:
        if not self._windows:
            return
        owned = {id(parameter) for parameter in module.parameters()}
        for window in self._windows.values():
            if any(id(parameter) in owned for parameter in window.track.probed()):
                self._cleared(window.track)

    def _cleared(self, track: OptimizerTrack) -> None:
        window = self._windows.get(track.serial)
        if window is not None and not track.depth:
            window.cleared = True
            window.script_window_over()

    # --- giving the loop back -----------------------------------------------------------------

    def refuse(self, reason: str, *, more_comes: bool = False) -> None:
        """K is 1 from here on; what was gathered is applied at the next step of its optimizer.

        `more_comes`: backwards will add to gradients that already hold what was kept.
        """
        if self.refused is not None:
            return
        self.refused, k, self.k = reason, self.k, 1
        for track in self._loop.tracks.live:
            window = self._windows.get(track.serial)
            if window is not None:
                if window.merged and window.is_current() and not (window.unsure or more_comes):
                    # Its gradients are as they should be; the sums, if the script clears them.
                    window.stash.scale(k)
                    continue
                reason += window.give_up(k)
            if self._seed_in_flight == 1:
                self._give_back(track, k)
        self._said(reason)

    def _give_back(self, track: OptimizerTrack, k: int) -> None:
        """Gradients that were seeded with 1/k become those of the script's own backward."""
        optimizer = track.ref()
        window = self._windows.get(track.serial)
        if optimizer is not None and track.has_open and not (window is not None and window.merged):
            scale_gradients(optimizer, k)

    def abandon(self, reason: str) -> None:
        deciding = [window for window in self._windows.values() if window.swallows is False]
        self.refuse(reason)
        for window in deciding:
            # Its update has begun: nobody may come by again before the step.
            optimizer = window.track.ref()
            if optimizer is not None and not window.merged:
                window.swallows = False
                self._merge(window, optimizer)
