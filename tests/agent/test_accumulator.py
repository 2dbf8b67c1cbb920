"""`watch()` loops: what a window of micro-batches does is what one big batch would do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpwatch.events import AgentExited
from mpwatch_agent.accumulator import Accumulator
from mpwatch_agent.micro_splits import split
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Recording(torch.optim.SGD):
    """Keeps the gradients of each step instead of stepping far."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad.clone() for p in self.param_groups[0]["params"]]
        self.seen.append(grads)
        return super().step(closure)


def error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    apart = sum(float((a - b).pow(2).sum()) for a, b in zip(got, wanted, strict=True))
    return math.sqrt(apart / sum(float(b.pow(2).sum()) for b in wanted))


def unequal() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 4, generator=generator), torch.arange(12) % 3, [2, 3, 7]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("normalize", ["mean", "tokens"])
def test_unequal_micro_batches_make_the_gradient_of_one_batch(normalize: str, scaled: bool) -> None:
    x, y, sizes = unequal()
    model = model_of()
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    optimizer = Recording(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
    gather = Accumulator(optimizer, 3, normalize=normalize, scaler=scaler)
    reduction = "mean" if normalize == "mean" else "sum"
    micro = list(zip(x.split(sizes), y.split(sizes), strict=True))
    for a, b in gather.batches(micro):
        over = gather.backward(
            nn.functional.cross_entropy(model(a), b, reduction=reduction), weight=len(a)
        )
    assert over
    assert gather.updates == 1
    assert error(optimizer.seen[0], list(wanted)) < 1e-6


def test_token_weights_are_the_published_example() -> None:
    """Ten tokens with a loss of 2 and ninety with 1: 1.1, where the mean of means says 1.5."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gather = Accumulator(optimizer, 2)
    for mean, tokens in gather.batches([(2.0, 10), (1.0, 90)]):
        gather.backward(weight * mean, weight=tokens)
    assert weight.item() == pytest.approx(-1.1, rel=1e-6)


@pytest.mark.parametrize(
    ("partial", "left", "updates", "carried", "dropped"),
    [("auto", 2, 2, 0, 0), ("auto", 1, 1, 1, 0), ("step", 1, 2, 0, 0), ("carry", 3, 1, 3, 0),
     ("drop", 3, 1, 0, 3)],
)  # fmt: skip
def test_a_short_last_window(
    partial: str, left: int, updates: int, carried: int, dropped: int
) -> None:
    weight = nn.Parameter(torch.zeros(()))
    gather = Accumulator(torch.optim.SGD([weight], lr=1.0), 4, partial=partial)
    for value in gather.batches([1.0] * (4 + left)):
        gather.backward(weight * value)
    # Divided by what arrived: each update moves by the mean, which is one.
    assert weight.item() == -updates
    assert (gather.updates, gather.micro_batches, gather.dropped) == (updates, carried, dropped)
    if carried:
        for value in gather.batches([1.0] * (4 - carried)):
            gather.backward(weight * value)
        assert weight.item() == -updates - 1


@pytest.mark.parametrize(
    ("policy", "moved", "skipped", "seen"),
    [("skip", -1.0, 1, 8), ("early-abort", -1.0, 1, 8), ("retry", -2.0, 1, 12)],
)
def test_an_overflow_voids_the_window(policy: str, moved: float, skipped: int, seen: int) -> None:
    """The scale overflows fp16's range once: skipped, or the same four again at half of it."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    gather = Accumulator(
        optimizer, 4, scaler=scaler, scheduler=scheduler, on_overflow=policy, normalize="sum"
    )
    yielded, skips = 0, []
    for index in gather.batches(range(8)):
        yielded += 1
        loss = weight * 0.25
        if index == 3 and scaler.get_scale() == 2.0**16:
            loss = loss * float("inf")
        if gather.backward(loss):
            skips.append(gather.step_was_skipped)
    assert yielded == seen
    assert weight.item() == pytest.approx(moved)
    assert (gather.skipped, scaler.get_scale()) == (skipped, 2.0**15)
    assert skips[0] is True
    assert scheduler.last_epoch == gather.updates
    assert gather.retried == (policy == "retry")


def test_early_abort_gives_up_at_the_first_bad_micro_batch() -> None:
    weight = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    gather = Accumulator(
        torch.optim.SGD([weight], lr=1.0), 4, scaler=scaler, on_overflow="early-abort"
    )
    factors = [float("inf") if index == 1 else 1.0 for index in range(6)]
    ends = [gather.backward(weight * factor) for factor in gather.batches(factors)]
    assert ends == [False, True, False, False, False, True]
    assert weight.item() == -1.0


def test_sums_in_half_precision_are_kept_in_single() -> None:
    """4096 times a thousandth: bf16 alone stalls at 0.5."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    optimizer = Recording([weight])
    gather = Accumulator(optimizer, 4096, normalize="sum")
    for _ in gather.batches(range(4096)):
        gather.backward(weight * 0.001)
    exact = 4096 * torch.tensor(0.001, dtype=torch.bfloat16).double()
    assert optimizer.seen[0][0].double() == pytest.approx(float(exact), rel=2**-8)


def test_a_batch_is_split_along_its_first_axis() -> None:
    x, y, _ = unequal()
    pieces = split({"x": x, "rest": [y, "label"]}, 5)
    assert [len(piece["x"]) for piece in pieces] == [2, 2, 3, 2, 3]
    assert torch.equal(torch.cat([piece["rest"][0] for piece in pieces]), y)
    assert pieces[0]["rest"][1] == "label"
    model = model_of()
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    optimizer = Recording(model.parameters())
    gather = Accumulator(optimizer, 5)
    for a, b in gather.split((x, y)):
        gather.backward(nn.functional.cross_entropy(model(a), b), weight=len(a))
    assert error(optimizer.seen[0], list(wanted)) < 1e-6
    with pytest.raises(ValueError, match="first dimension"):
        split((x, y[:3]), 2)


def test_a_window_changes_between_updates_and_survives_a_checkpoint() -> None:
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gather = Accumulator(optimizer, 3)
    ends = []
    for index in gather.batches(range(7)):
        ends.append(gather.backward(weight * 1.0))
        if index == 1:
            gather.window = 2
    assert ends == [False, False, True, False, True, False, True]
    again = Accumulator(optimizer, 9)
    again.load_state_dict(gather.state_dict())
    assert (again.window, again.updates) == (2, 3)
    for bad in (0, -1, "x", 2.5, True):
        with pytest.raises(ValueError, match="window is"):
            gather.window = bad  # type: ignore[assignment]
    with pytest.raises(ValueError, match="allowed are mean, tokens, sum"):
        Accumulator(optimizer, 2, normalize="average")
    with pytest.raises(ValueError, match="number of tokens"):
        Accumulator(optimizer, 2, normalize="tokens").backward(weight * 1.0)


UNEQUAL = """
import torch
from mpwatch_agent import watch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with watch(optimizer) as job:
    gather = job.accumulator(optimizer, 3)
    for _ in range(4):
        seen = []
        for size in (8, 8, 2):
            loss = (model(torch.randn(size, 4)) - 3).pow(2).mean()
            seen.append((loss.item(), size))
            gather.backward(loss, weight=size)
        print(sum(loss * size for loss, size in seen) / 18)
"""


REST = """
import torch
from mpwatch_agent import watch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(job, micro_batches, partial):
    # Gone when the run ends, with what it holds.
    gather = job.accumulator(optimizer, 4, partial=partial)
    updates = 0
    for x in gather.batches(torch.randn(2, 4) for _ in range(micro_batches)):
        updates += gather.backward(model(x).pow(2).mean())
    print(updates, gather.updates, gather.micro_batches)

with watch(optimizer) as job:
    train(job, 8, "carry")
    train(job, 5, "step")
    train(job, 6, "drop")
    train(job, 7, "carry")
"""


def test_a_rest_that_is_carried_to_the_end_is_reported(tmp_path: Path, forge: Forge) -> None:
    (tmp_path / "script.py").write_text(REST)
    with listening(tmp_path) as listener:
        process = forge.run(tmp_path / "script.py", tmp_path, specification=specification(tmp_path))
        while process.poll() is None:
            listener.drain(0.1)
        listener.drain(0.2)
    # Whole windows, a stepped rest, a dropped one: nothing waits. Of the last seven, three do.
    assert process.communicate()[0].decode().splitlines() == ["2 2 0", "1 2 0", "1 1 0", "1 1 3"]
    (exited,) = listener.of(AgentExited)
    assert exited.windows_dropped == 3
    assert len(listener.steps()) == 6


def test_the_reported_loss_is_the_mean_over_samples(tmp_path: Path, forge: Forge) -> None:
    (tmp_path / "script.py").write_text(UNEQUAL)
    with listening(tmp_path) as listener:
        process = forge.run(tmp_path / "script.py", tmp_path, specification=specification(tmp_path))
        listener.follow(process)
    true = [float(line) for line in process.communicate()[0].split()]
    assert [step.loss for step in listener.steps()] == pytest.approx(true, rel=1e-5)
