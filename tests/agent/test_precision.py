"""Zero-code mixed precision against the same loop with it written by hand: bit for bit."""

import collections
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwatch.events import HookDisabled, PrecisionApplied, PrecisionRefused
from mpwatch_agent.casting import to_fp32
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


# Every gradient of the second bias is 1, and they add up: that optimizer never clears them.
KEPT = """
import torch
models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models)
x = torch.ones(4, 4)
for _ in range(3):
    models[1](x).mean().backward()
    second.step()
    kept = models[1].bias.grad.item()
    models[0](x).mean().backward()
    first.step()
    first.zero_grad()
    print(kept, models[1].bias.grad.item())
"""


def test_gradients_that_are_kept_never_mix_scales(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(KEPT)
    spec = specification(tmp_path, precision="O1:fp16", scaler="torch", init_scale=1024.0)
    with listening(tmp_path) as listener:
        run = forge.run(tmp_path / "kept.py", tmp_path, specification=spec)
        (words,) = finish(listener, run)
    assert words == ["1.0", "1.0", "2.0", "2.0", "3.0", "3.0"]
    assert [event.scaler for event in listener.of(PrecisionApplied)] == ["torch"]
    assert listener.of(PrecisionRefused) == []


Pair = collections.namedtuple("Pair", "value rest")


class Own:
    """What nobody knows to look into."""


def test_outputs_are_cast_whatever_they_are_packed_in() -> None:
    half, double = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64)
    left: set[str] = set()

    def formats(output: Any) -> list[str]:
        return [str(tensor.dtype).removeprefix("torch.") for tensor in output]

    pair = to_fp32(Pair(half, [half.bfloat16(), double]), left)
    assert type(pair) is Pair
    assert (formats([pair.value]), formats(pair.rest)) == (["float32"], ["float32", "float64"])
    ordered = to_fp32(collections.OrderedDict(a=half, b=double), left)
    assert type(ordered) is collections.OrderedDict
    assert formats(ordered.values()) == ["float32", "float64"]
    largest = to_fp32(torch.max(half.view(1, 2), 1), left)
    assert type(largest) is torch.return_types.max
    assert formats(largest) == ["float32", "int64"]
    assert left == set()
    own = Own()
    assert to_fp32((own, 3, None), left) == (own, 3, None)
    assert left == {"Own"}
