"""What is wrong with how a loop is put together: looked at once per optimizer, or where it fails.

Reads dtypes, settings and the order of calls; the errors these lead to stay the script's own.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.vocabulary import clean_text, scale_words
from mpwatch_agent.diagnoses import Diagnosis
from mpwatch_agent.naming import Names

if TYPE_CHECKING:
    from mpwatch_agent.roots import Roots
    from mpwatch_agent.tracks import OptimizerTrack

# The smallest eps that is not zero, or nearly so, in fp16.
FP16_EPS = 6e-8
NAMED_AT_MOST = 4


def fp16_weights(optimizer: Any, roots: "Roots") -> Diagnosis | None:
    """A scaler unscales fp32 gradients only: weights must not be fp16 themselves."""
    trainable = [p for p in _parameters(optimizer) if p.requires_grad]
    half = [p for p in trainable if p.dtype is torch.float16]
    if not half:
        return None
    return Diagnosis(
        "weights_are_fp16",
        "fault",
        f"{len(half)} of {len(trainable)} trainable tensors are float16: {_named(half, roots)};"
        " GradScaler needs float32 weights (and autocast)",
        "cast these modules to float32 and let autocast choose the precision of operations",
    )


def vanishing_eps(optimizer: Any, roots: "Roots") -> Diagnosis | None:
    """An eps that is zero in the parameters' own precision divides by zero."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        half = [p for p in group["params"] if p.requires_grad and p.dtype is torch.float16]
        if half and isinstance(eps, float) and eps < FP16_EPS:
            return Diagnosis(
                "eps_vanishes_in_fp16",
                "warning",
                f"eps {eps:g} of {type(optimizer).__name__} underflows in float16, in which"
                f" {len(half)} of its tensors are kept: {_named(half, roots)}",
                "fp32 weights under autocast (fp32 master weights), or eps of at least 1e-4",
            )
    return None


@torch.no_grad()
def broken_update(optimizer: Any, roots: "Roots") -> Diagnosis | None:
    """Weights that an update made non-finite while their gradients were finite (fp16 only)."""
    half = [
        p for p in _parameters(optimizer) if p.dtype is torch.float16 and type(p.grad) is _PLAIN
    ]
    broken = [p for p in half if not _finite(p.detach()) and _finite(p.grad)]
    if not broken:
        return None
    return Diagnosis(
        "update_not_finite",
        "fault",
        f"the update of {type(optimizer).__name__} made weights non-finite while their gradients"
        f" are finite: {_named(broken, roots)}; its eps underflows in float16",
        "fp32 weights under autocast (fp32 master weights), or eps of at least 1e-4",
    )


_PLAIN = torch.Tensor


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def without_gradients(
    optimizer: Any, track: "OptimizerTrack", leader_steps: int, roots: "Roots"
) -> Diagnosis | None:
    """`scaler.step` failed: has this optimizer any gradient at all?"""
    parameters = list(_parameters(optimizer))
    if any(parameter.grad is not None for parameter in parameters):
        return None
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    ever = (
        f"it had some in {track.steps} of {max(leader_steps, track.steps)} steps before"
        if track.steps
        else "it never had one"
    )
    why = f", {frozen} of them frozen" if frozen else ""
    return Diagnosis(
        "optimizer_without_gradients",
        "fault",
        f"{type(optimizer).__name__}: 0 of {len(parameters)} parameters{why} have gradients at this"
        f" step ({_named(parameters, roots)}); {ever}",
        "step an optimizer only when it has gradients; or it was made for other tensors than those"
        " that are trained, or the loss is detached from them",
    )


def unscaled_twice(track: "OptimizerTrack", calls: Sequence[str], stepped: bool) -> Diagnosis:
    """`unscale_` failed: it, or the step (`stepped`), came before with no update since.

    `calls` are the newest of the scaler, this one the last.
    """
    held, usual = len(track.window), track.usual_window or 1
    where = f", {held} micro-batches into a window that is usually {usual} long"
    after = "after scaler.step(optimizer)" if stepped else "a second time"
    since, seen = _since_update(calls)
    if stepped and "scaler.step" not in seen:
        # A step that needs no looking at leaves no call behind.
        seen.append("scaler.step")
    order = ", then ".join([*seen, "unscale_, which torch refused"])
    return Diagnosis(
        "unscaled_twice",
        "fault",
        f"scaler.unscale_(optimizer) was called {after} with no scaler.update() in"
        f" between{where if held > 1 or usual > 1 else ''}; {since}: {order}",
        "call scaler.update() once after the step, before the next unscale_"
        if stepped
        else "call unscale_ once per window, on the same condition as clip and step: two counters"
        " of micro-batches disagree, often where an epoch ends inside a window",
    )


def _since_update(calls: Sequence[str]) -> tuple[str, list[str]]:
    """How to name the calls since the last update, and those calls without the newest."""
    updates = [place for place, call in enumerate(calls) if call == "update"]
    first = updates[-1] + 1 if updates else 0
    return "since the last update" if updates else "up to here", list(calls)[first:-1]


def scaler_not_restored(optimizer: Any, scaler: Any) -> Diagnosis | None:
    """The optimizer goes on where it was, its scaler begins anew."""
    steps = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    known = [int(step) for step in steps if isinstance(step, int | float)]
    known += [int(s.item()) for s in steps if isinstance(s, torch.Tensor) and s.is_cpu]
    if not optimizer.state:
        return None
    at = f" at step {max(known)}" if known else ""
    return Diagnosis(
        "scaler_not_restored",
        "warning",
        f"the optimizer's state was loaded{at}, the scaler restarted at"
        f" {scale_words(scaler._init_scale)}:"
        " expect skipped steps until it has come down, then growth from there",
        "save scaler.state_dict() with the checkpoint and load it before the first step",
    )


def clipped_scaled(norm: float | None, scale: float | None, steps: int) -> Diagnosis:
    """A clip before unscale bounds scaled gradients: updates become smaller by the scale."""
    seen = "" if norm is None else f": norm {norm:.4g} seen"
    true = ""
    if scale and norm is not None:
        true = f" at scale {scale_words(scale)}, true norm {norm / scale:.4g}"
    return Diagnosis(
        "clipped_before_unscale",
        "fault",
        f"gradients are clipped before they are unscaled, in {steps} steps so far{seen}{true}",
        "call scaler.unscale_(optimizer) before clip_grad_norm_",
    )


def _parameters(optimizer: Any) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _named(parameters: list[Any], roots: "Roots") -> str:
    names = Names(roots.modules())
    shown = [names.of(p, 0, index).parameter for index, p in enumerate(parameters[:NAMED_AT_MOST])]
    more = f" and {len(parameters) - NAMED_AT_MOST} more" if len(parameters) > NAMED_AT_MOST else ""
    return clean_text(", ".join(shown) + more, 400)
