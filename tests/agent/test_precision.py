"""Zero-code mixed precision against the same loop with it written by hand: bit for bit."""

import itertools
from pathlib import Path

import pytest

from mpwatch.events import HookDisabled, PrecisionApplied, PrecisionRefused
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge, ForgedRun

LOOP = Path(__file__).resolve().parents[1] / "support" / "precision_loop.py"
FP16_STYLES = (
    "accumulate",
    "accumulated",
    "fused_no_clip",
    "several",
    "zeros",
    "checkpoint_reentrant",
    "tuple",
    "packed",
    "list",
)
CASES = [
    *((style, "O1", "fp16") for style in FP16_STYLES),
    *((style, "O1", "bf16") for style in ("accumulate", "sgd")),
    *((style, "O2", "fp16") for style in ("accumulate", "checkpoint")),
    ("sgd", "O2", "bf16"),
]


def finish(listener: Listener, *runs: ForgedRun) -> list[list[str]]:
    """The words that each run printed; the first one's events are taken meanwhile."""
    listener.follow(*runs)
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), outputs
    return [out.decode().split() for out, _ in outputs]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weights_are_those_of_the_hand_written_loop(
    case: tuple[str, str, str], forge: Forge, tmp_path: Path
) -> None:
    style, mode, dtype = case
    extra = ["overflow"] if dtype == "fp16" else []
    hand = f"{dtype}:O2" if mode == "O2" else dtype
    settings: dict[str, str | int] = {"precision": f"{mode}:{dtype}"}
    if style == "accumulated":
        # Three windows of the script per update, against three micro-batches by hand.
        settings["accumulate"] = 3
    if dtype == "fp16":
        settings |= {"scaler": "torch", "growth_interval": "4"}
    specified = specification(tmp_path, **settings)
    (tmp_path / "twin").mkdir()
    with listening(tmp_path) as listener:
        arguments = ("virtual" if style == "accumulated" else style, "none", "0", *extra)
        run = forge.run(LOOP, tmp_path, *arguments, specification=specified)
        arguments = ("accumulate" if style == "accumulated" else style, hand, "65536", *extra)
        by_hand = forge.run(LOOP, tmp_path / "twin", *arguments, specification=None)
        watched, twin = finish(listener, run, by_hand)
    assert watched[:3] == twin[:3]
    assert watched[2] == "True"
    applied = listener.of(PrecisionApplied)
    assert [(event.mode, event.dtype) for event in applied] == [(mode, dtype)]
    # Only where the input itself wants a gradient, which carries the scale.
    assert len(applied[0].notes) == (style == "checkpoint_reentrant")
    assert listener.of(PrecisionRefused) == listener.of(HookDisabled) == []
    steps = listener.steps()
    assert len(steps) == 24
    if dtype == "bf16":
        assert all(step.applied and step.loss_scale_before is None for step in steps)
        return
    # "APPLIED 0110... SCALE s" as torch's own scaler had it.
    assert "".join(str(int(step.applied)) for step in steps) == twin[4]
    assert "0" in twin[4]
    assert steps[-1].loss_scale_after == float(twin[6])
    assert steps[0].loss_scale_before == 65536.0
    assert [step.overflow for step in steps] == [not step.applied for step in steps]
    for step, following in itertools.pairwise(steps):
        assert step.loss_scale_after == following.loss_scale_before
