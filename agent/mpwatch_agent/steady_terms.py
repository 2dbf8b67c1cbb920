"""When the next steps may be noted instead of looked at: everything is as it was, nothing is due.

Asked after ordinary steps, so cheap where the answer is no.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils._device import DeviceContext

from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.gradient_watch import EARLY_STEP
from mpwatch_agent.losses import DIVISOR_EVERY, DIVISOR_WINDOWS

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.shield import Gate

_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
_mode_at: Callable[[int], object] = getattr(torch._C, "_get_function_stack_at", lambda place: None)
# As many steps as anybody would wait for.
_MANY = 1 << 30


def steps_alike(agent: "Agent", draft: StepDraft) -> int:
    """How many steps from now on can be noted; `draft` is the step that has just ended."""
    gate, loop = agent.gate, agent.loop
    track = loop.tracks.leader
    if not loop.lazy and agent.faults is None:
        _look_who_is_left(gate, loop)
    if not loop.lazy or gate.steers or gate.compiles or draft.optimizer or track is None:
        return 0
    if track.steps < DIVISOR_WINDOWS or not track.is_even(len(draft.window)):
        return 0
    if not (gate.open and gate.bound and agent.knows_loop) or agent.roots.searching:
        return 0
    if not _is_plain(loop) or not agent.observing.is_plain() or not agent.boundary.is_plain():
        return 0
    if _is_seen() or draft.unusual():
        return 0
    return min(_until_due(agent, track.steps), _until_growth(loop, draft))


def _look_who_is_left(gate: "Gate", loop: "Loop") -> None:
    """An optimizer was replaced: with one left hooks may wait for the next one again."""
    live = loop.tracks.live
    if not gate.steers and len(live) > 1 and any(track.ref() is None for track in live):
        loop.tracks.forget_dead()
        loop.lazy = len(loop.tracks.live) == 1 and not loop.windows.in_backward


def _is_seen() -> bool:
    """Whether a mode would see our readings; a default device only tells where tensors are made."""
    modes = range(_function_modes())
    return _dispatch_modes() > 0 or any(type(_mode_at(i)) is not DeviceContext for i in modes)


def _is_plain(loop: "Loop") -> bool:
    """Whether nothing is open or waits, and all there is of the loop has been seen."""
    windows, leader = loop.windows, loop.tracks.leader
    return (
        loop.ended_at is None
        and loop.forward is None
        and not loop.pending
        and loop.in_scaler_step is None
        and loop.steered_scale is None
        and leader is not None
        and not leader.window
        and len(loop.tracks.live) == 1
        and windows.roots_seen
        and windows.micro is None
        and not (windows.in_backward or windows.stepping)
    )


def _until_due(agent: "Agent", steps: int) -> int:
    """Steps until one that is sampled, or for which more is read than usual."""
    sampling, loop = agent.sampling, agent.loop
    track = loop.tracks.leader
    assert track is not None
    left = agent.boundary.steps_left()
    due = [
        (sampling.grad_norm_every, steps),
        (sampling.gradients_every, steps + 1),
        # Asked at the end of the step before.
        (sampling.activations_every, loop.steps + 2),
        (DIVISOR_EVERY if track.usual_window != 1 else 0, steps),
    ]
    for every, count in due:
        if every:
            left = min(left, -count % every)
    return 0 if steps == EARLY_STEP else left


def _until_growth(loop: "Loop", draft: StepDraft) -> int:
    """Steps before the one whose update makes the loss scale grow."""
    if not draft.checked:
        return _MANY
    scaler, scale = loop.scaler, draft.scale_after
    if scaler is None or scaler._scale is None:
        return 0
    if type(scale) is not float:
        # On its way from a device: the scale is read at each update then.
        return _MANY
    if draft.scale_before != scale:
        return 0
    return int(scaler._growth_interval) - int(scaler._growth_tracker.item()) - 1
