"""Overflows are named as they were put in, and what is run again leaves nothing behind."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from mpwatch.events import DiagnosisRaised, HookDisabled, OverflowLocated, StepFinished
from mpwatch_agent import finiteness, verdicts
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def run(
    forge: Forge, directory: Path, script: Path, *arguments: str, **settings: object
) -> tuple[Listener, str, str]:
    """(events, stdout, stderr) of a watched run"""
    directory.mkdir(exist_ok=True)
    with listening(directory) as listener:
        spec = specification(directory, **settings)
        process = forge.run(script, directory, *arguments, specification=spec)
        listener.follow(process)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert not listener.of(HookDisabled)
    return listener, stdout.decode(), stderr.decode()


def plain(forge: Forge, directory: Path, script: Path) -> str:
    directory.mkdir()
    process = forge.run(script, directory, specification=None)
    process.wait()
    return process.communicate()[0].decode()


def found(listener: Listener) -> list[str]:
    return [
        f"{each.step} {each.micro_batch} {each.parameter} {each.nonfinite}"
        for each in listener.of(OverflowLocated)
    ]


@pytest.mark.parametrize(
    ("net", "how", "micro", "rest", "locate"),
    [
        ("transformer", "whole", "3", (), "auto"),
        ("conv", "whole", "2", (), "auto"),
        ("conv", "single", "3", (), "full"),
        ("transformer", "single", "1", ("clip",), "full"),
    ],
)
def test_every_parameter_and_micro_batch_is_named(
    tmp_path: Path,
    forge: Forge,
    net: str,
    how: str,
    micro: str,
    rest: tuple[str, ...],
    locate: str,
) -> None:
    listener, put_in, _ = run(
        forge, tmp_path, SUPPORT / "overflow_net.py", net, how, micro, *rest, locate=locate
    )
    assert found(listener) == put_in.splitlines()
    located = listener.of(OverflowLocated)
    assert {(each.where, each.order) for each in located} == {("backward", "graph")}
    scale = None if rest else 1024.0
    assert located[0].loss_scale == scale
    # Each is told right after the step that it belongs to.
    order = [
        (type(event).__name__, getattr(event, "step", None))
        for _, event in listener.events
        if isinstance(event, StepFinished | OverflowLocated)
    ]
    for each in located:
        at = order.index(("OverflowLocated", each.step))
        assert order[at - 1] == ("StepFinished", each.step)
    steps = {step.step: step for step in listener.steps()}
    assert all(steps[each.step].overflow for each in located)
    assert all((step.step % 2 == 0) == bool(step.overflow) for step in listener.steps())


@pytest.mark.parametrize("element", [0, -1])
def test_a_block_of_each_tensor_is_watched(element: int) -> None:
    """By default a whole tensor is never missed; of a large one a single element may be."""
    model = nn.Sequential(nn.Linear(100, 90), nn.Conv2d(3, 8, 3), nn.LayerNorm(7))
    gradients = [torch.randn(p.shape) for p in model.parameters()]
    gradients.append(torch.randn(40, 50).t())
    for index, gradient in enumerate(gradients):
        watched = [each.clone() if i == index else each for i, each in enumerate(gradients)]
        watched[index].fill_(float("nan"))
        for look in (finiteness.watched_sum, finiteness.whole_sum):
            total = look(watched)
            assert total is not None
            assert not torch.isfinite(total)
        one = [each.clone() if i == index else each for i, each in enumerate(gradients)]
        one[index].reshape(-1)[element] = float("inf")
        if gradient.is_contiguous():
            total = finiteness.whole_sum(one)
            assert total is not None
            assert not torch.isfinite(total)
    for look in (finiteness.watched_sum, finiteness.whole_sum):
        total = look(gradients)
        assert total is not None
        assert torch.isfinite(total)


def test_half_precision_sums_do_not_overflow_by_themselves() -> None:
    full = [torch.full((1000,), 60000.0, dtype=torch.float16), torch.full((9,), 60000.0).half()]
    for look in (finiteness.watched_sum, finiteness.whole_sum):
        total = look(full)
        assert total is not None
        assert torch.isfinite(total)


def test_a_forward_names_its_module_and_nothing_is_left_of_it(tmp_path: Path, forge: Forge) -> None:
    script = SUPPORT / "nan_net.py"
    expected = plain(forge, tmp_path / "plain", script)
    listener, stdout, stderr = run(forge, tmp_path / "watched", script)
    assert stdout == expected
    assert all(line.startswith("mpwatch: ") for line in stderr.splitlines())
    located = listener.of(OverflowLocated)
    assert [each.module for each in located] == [
        "first", "body.0", "body.1", "body.2", "odd", "last",
    ]  # fmt: skip
    assert [each.step for each in located] == [25, 50, 75, 100, 125, 150]
    assert {(each.where, each.verdict, each.micro_batch) for each in located} == {
        ("forward", "forward", 1)
    }
    assert all("inputs" in each.evidence and "finite (between" in each.evidence for each in located)


LOOP = """
import torch, sys
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
"""
# The gradient of its second layer's output overflows: two layers of three are hit.
HALF_WAY = """
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Sequential):
    bad = False
    def body(self, x):
        return self[1](self[0](x))
    def forward(self, x):
        x = RUN_BODY
        if self.bad:
            x.register_hook(lambda gradient: gradient * float("inf"))
        return self[2](x)
model = Net(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    model.bad = step == 5
    scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""
CASES = {
    # name: (script, settings, what OverflowLocated says)
    "it came half-way": (
        HALF_WAY.replace("RUN_BODY", "self.body(x)"),
        {},
        {"module": "1", "parameters_hit": 4, "parameters_looked_at": 6, "order": "graph"},
    ),
    "it came half-way, out of sight": (
        HALF_WAY.replace(
            "RUN_BODY", "checkpoint(self.body, x.requires_grad_(), use_reentrant=True)"
        ),
        {},
        {"module": "1", "parameters_hit": 4, "order": "registration"},
    ),
    "the batch itself is not finite": (
        """
for step in range(6):
    x = torch.randn(8, 4)
    if step == 4: x[3, 2] = float("nan")
    scaler.scale(model(x).pow(2).mean()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        {},
        {"verdict": "bad_batch", "where": "forward", "micro_batch": 0},
    ),
    "the scale is too high": (
        """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
with torch.autocast("cpu", torch.float16):
    out = model(torch.randn(8, 4))
scaler.scale(out.float().sum()).backward()  # 65536 is Inf in fp16
scaler.step(optimizer); scaler.update()
""",
        {},
        {"verdict": "scale_too_high", "where": "backward", "loss_scale": 65536.0},
    ),
    "gradients were not cleared": (
        """
for step in range(4):
    scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    if step == 2: model[1].weight.grad.fill_(float("inf"))
    scaler.step(optimizer); scaler.update()
    if step != 2: optimizer.zero_grad()
""",
        {},
        {"verdict": "carried_over", "step": 4, "parameter": "1.weight"},
    ),
    "weights are not finite any more": (
        """
for step in range(3):
    if step == 2: model[0].weight.data[0, 0] = float("nan")
    scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        {},
        {"verdict": "diverging", "where": "forward", "module": "0"},
    ),
    "a forward that overflows fp16": (
        """
for step in range(3):
    with torch.autocast("cpu", torch.float16):
        out = model(torch.randn(8, 4) * (1e6 if step == 2 else 1.0))
    scaler.scale(out.float().pow(2).mean()).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        {},
        {"verdict": "forward", "where": "forward", "module": "0"},
    ),
    "a forward that overflows fp16 by our autocast": (
        """
for step in range(3):
    model(torch.randn(8, 4) * (1e6 if step == 2 else 1.0)).pow(2).mean().backward()
    optimizer.step(); optimizer.zero_grad()
""",
        {"precision": "O1:fp16", "scaler": "torch"},
        {"verdict": "forward", "where": "forward", "module": "0"},
    ),
    "micro-batches are not watched": (
        """
for step in range(3):
    for micro in range(2):
        scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    if step == 2: model[1].weight.grad.fill_(float("inf"))
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        {"locate": "off"},
        {"micro_batch": None, "micro_batch_reason": "micro-batches are not watched (--locate off)"},
    ),
    "a fused optimizer": (
        """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
for step in range(4):
    scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    if step == 3: model[0].bias.grad.fill_(float("nan"))
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        {},
        {"step": 4, "parameter": "0.bias", "nonfinite": "nan", "micro_batch": 0},
    ),
}


@pytest.mark.parametrize(
    ("clean", "said"),
    [
        (0, "the loss was finite, and no window before it was clean at scale 8"),
        (1, "the loss was finite, and only 1 window before it was clean at scale 8"),
        (2, "the loss was finite, and only 2 windows before it were clean at scale 8"),
    ],
)
def test_few_clean_windows_in_words(clean: int, said: str) -> None:
    verdict = verdicts.judge(verdicts.Findings(scale=8.0, clean_windows=clean))
    assert verdict == ("scale_too_high", said)


def test_headroom_is_that_of_the_finite_gradients_with_their_scale(
    tmp_path: Path, forge: Forge
) -> None:
    # Unscaled by itself, and by scaler.step.
    for index, unscale in enumerate(("", "scaler.unscale_(optimizer); ")):
        said = "print(max(p.grad.abs().max().item() for p in model[2].parameters()))"
        text = HALF_WAY.replace("RUN_BODY", "self.body(x)")
        script = tmp_path / f"{index}.py"
        script.write_text(LOOP + text.replace("scaler.step(", f"{said}; {unscale}scaler.step("))
        listener, stdout, _ = run(forge, tmp_path / str(index), script)
        (located,) = listener.of(OverflowLocated)
        scaled = float(stdout.split()[-1])
        assert located.headroom_octaves == pytest.approx(math.log2(65504 / scaled))
        assert f"largest finite scaled gradient {scaled:.3g}," in located.evidence


@pytest.mark.parametrize("name", CASES)
def test_verdicts_speak_for_what_was_done(tmp_path: Path, forge: Forge, name: str) -> None:
    text, settings, expected = CASES[name]
    script = tmp_path / "script.py"
    script.write_text(LOOP + text)
    listener, _, stderr = run(forge, tmp_path, script, **settings)
    located = listener.of(OverflowLocated)
    assert located
    last = located[-1]
    assert {field: getattr(last, field) for field in expected} == expected
    assert last.evidence in stderr


def test_a_bad_batch_is_kept_and_runs_again(tmp_path: Path, forge: Forge) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP + CASES["the batch itself is not finite"][0])
    listener, _, _ = run(forge, tmp_path / "run", script, dump_bad_batch=True)
    (located,) = listener.of(OverflowLocated)
    kept = tmp_path / "run" / located.dumped
    assert sorted(path.name for path in kept.iterdir()) == [
        "batch.json", "batch.safetensors", "weights.safetensors",
    ]  # fmt: skip
    listener, _, stderr = run(forge, tmp_path / "again", script, replay_batch=str(kept))
    assert "the batch itself has NaN" in stderr
    assert not listener.of(StepFinished)
    (said,) = listener.of(DiagnosisRaised)
    assert (said.name, said.severity) == ("replayed_batch", "fault")
