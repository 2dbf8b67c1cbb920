"""Where a loss is known only after its backward (a device; here a CPU that is made to be late)."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from mpwatch.events import OverflowLocated
from mpwatch_agent.armed_trace import ArmedTrace
from mpwatch_agent.held_inputs import HeldInputs
from mpwatch_agent.shield import Gate
from mpwatch_agent.witness import Scene
from tests.agent.test_locating import run
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "late_nan.py"
WATCHED = "forwards are watched"
CASES = {
    # name: (arguments of the script, settings, (step, module, words of the evidence) of each)
    "from a step on, with a scaler": (
        ("scaler", "8", "body.2:4"),
        {},
        [
            (4, None, "known on a device when its forward is over"),
            (5, "body.2", "the inputs of body.2 were finite (between 0 and"),
            (6, None, WATCHED),
            (7, "body.2", "its output was not: NaN"),
            (8, None, WATCHED),
        ],
    ),
    "an operation in place": (
        ("scaler", "3", "body.1:2"),
        {},
        [(2, None, WATCHED), (3, "body.1", "the inputs of body.1 were finite (between -")],
    ),
    "once": (("scaler", "7", "first:3-3"), {}, [(3, None, "--locate full holds the inputs")]),
    "once, with the inputs held": (
        ("scaler", "7", "first:3-3", "last:5-5"),
        {"locate": "full"},
        [(3, "first", "the inputs of first were finite"), (5, "last", "output was not: NaN")],
    ),
    "once, and the input was changed": (
        ("changed", "4", "first:3-3"),
        {"locate": "full"},
        [(3, None, "its input has been changed in place since")],
    ),
    "without a scaler": (
        ("plain", "9", "first:3"),
        {"grad_norm_every": 0},
        # A loss is heard of one step later; then the next step is looked into, and it begins anew.
        [(5, "first", "the inputs of first were"), (8, "first", "the inputs of first were")],
    ),
    "an overflow of the backward": (
        ("scaler", "7", "backward:6-6"),
        {},
        [(6, "first", "5 windows before it were clean at scale 256 or above; its loss as")],
    ),
    "healthy": (("scaler", "9", "first:99"), {}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_late_loss_is_looked_into(tmp_path: Path, forge: Forge, name: str) -> None:
    arguments, settings, expected = CASES[name]
    listener, stdout, _ = run(forge, tmp_path / "watched", SCRIPT, *arguments, **settings)
    (tmp_path / "plain").mkdir()
    unwatched = forge.run(SCRIPT, tmp_path / "plain", *arguments, specification=None)
    unwatched.wait()
    assert stdout == unwatched.communicate()[0].decode()
    located = listener.of(OverflowLocated)
    assert len(located) == len(expected)
    for each, (step, module, words) in zip(located, expected, strict=True):
        backward = "backward" in name
        assert (each.step, each.module) == (step, module)
        assert each.where == ("backward" if backward else "forward")
        assert each.verdict == ("bad_batch" if backward else "forward")
        assert words in each.evidence
        assert each.micro_batch == 1
        assert each.loss_scale == stdout_scale(stdout, step)


def stdout_scale(stdout: str, step: int) -> float | None:
    """The scale that the script saw after the step before: None where it has no scaler."""
    scales = [float(line.split()[2]) for line in stdout.splitlines()[:-1]]
    return None if scales[0] == 1.0 else ([256.0, *scales])[step - 1]


@pytest.mark.parametrize("why", ["compiles", "modes", "scripted", "evaluates", "disarmed", ""])
def test_hooks_are_put_on_plain_modules_only(why: str) -> None:
    gate = Gate()
    gate.compiles, gate.modes = why == "compiles", why == "modes"
    inner: nn.Module = nn.Sequential(nn.Linear(2, 2))
    if why == "scripted":
        inner = torch.jit.script(inner)
    root = nn.Sequential(inner, nn.ReLU(inplace=True))
    inner.train(why != "evaluates")
    trace = ArmedTrace(gate)
    if why != "disarmed":
        assert trace.arm(5, 1)
    trace.forward_begins(root)
    hooked = {name for name, module in root.named_modules() if module._forward_hooks}
    some = {"", "1"} if why in ("scripted", "evaluates") else {"", "0", "0.0", "1"}
    assert hooked == (some if why in ("scripted", "evaluates", "") else set())
    copied = copy.deepcopy(root) if why == "scripted" else pickle.loads(pickle.dumps(root))
    random = torch.get_rng_state()
    given = torch.tensor([[1.0, float("nan")]])
    assert torch.equal(copied(given).isnan(), root(given.clone()).isnan())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in root.modules())
    assert not any(module._forward_pre_hooks for module in root.modules())
    micro = object()
    trace.backward_begins(micro)
    seen = trace.read(micro)
    assert (seen is not None) == bool(hooked)
    if seen is not None:
        assert seen.bad_input == "the batch itself has NaN"


def test_no_more_is_held_than_the_limit() -> None:
    held = HeldInputs()
    micros = [object(), object(), object()]
    for micro, size in zip(micros, (40 << 18, 10 << 18, 16 << 18), strict=True):
        scene = Scene(None, (torch.empty(size),), None, torch.empty(0), None, None, None)
        held.hold(micro, [scene])
    assert [bool(held.of(micro)) for micro in micros] == [True, True, False]
    held.window_over()
    assert not any(held.of(micro) for micro in micros)
