"""Sampled and exact distributions against plain counting, and in a run that must not notice."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mpwatch.cli.gradients_table import gradients_text
from mpwatch.events import ActivationsSampled, GradientsSampled, LayerGradients
from mpwatch_agent import distribution, exponents
from mpwatch_agent.distribution import Histogram
from mpwatch_agent.gradient_report import Reading, share_error
from tests.agent.test_locating import plain, run
from tests.support.forge import Forge


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plainly(values: torch.Tensor) -> Histogram:
    """Counted by numpy, one logarithm-free exponent per value."""
    numbers = values.reshape(-1).float().numpy()
    finite = numbers[np.isfinite(numbers)]
    magnitudes = np.abs(finite[finite != 0])
    counts = [0] * distribution.BINS
    for exponent in np.maximum(np.frexp(magnitudes)[1] - 1, -127).tolist():
        counts[exponent + distribution.BIAS] += 1
    counts[distribution.NON_FINITE] = int((~np.isfinite(numbers)).sum())
    largest = float(magnitudes.max()) if magnitudes.size else 0.0
    return Histogram(counts, int((numbers == 0).sum()), largest)


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randn(shape, generator=generator) * 8 - 10)
    return sizes * torch.randn(shape, generator=generator).sign()


ODD = {
    "plain": spread(37, 53),
    "zeros": torch.zeros(100),
    "with zeros": spread(500) * (torch.arange(500) % 3 == 0),
    "infinite": torch.tensor([1.0, float("inf"), -float("inf"), 0.0, -3.0]),
    "nan": torch.tensor([float("nan"), 2.0**-130, 2.0**-149, 2.0**-126]),
    "half": spread(999).half(),
    "bf16": spread(999).bfloat16(),
    "transposed": spread(30, 40).t(),
    "channels last": spread(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one": torch.tensor(0.75),
}


@pytest.mark.parametrize("name", ODD)
def test_exact_counts_are_plain_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plainly(ODD[name])
    for chunk in (1 << 22, 100):
        monkeypatch.setattr(exponents, "CHUNK", chunk)
        (row,) = exponents.exact([ODD[name]]).rows.tolist()
        found = exponents.histogram_of(row)
        assert list(found.counts) == list(expected.counts)
        assert (found.zeros, found.max_abs) == (expected.zeros, expected.max_abs)


def test_a_factor_moves_every_count_down() -> None:
    values = spread(4000)
    (row,) = exponents.exact([values], 2.0**-10).rows.tolist()
    moved, before = exponents.histogram_of(row), plainly(values)
    assert list(moved.counts[:-20]) == list(before.counts[10:-10])


def test_a_sample_of_everything_is_exact() -> None:
    tensors = [ODD["plain"], ODD["with zeros"], ODD["one"]]
    generator = torch.Generator().manual_seed(0)
    counts = exponents.sampled(tensors, [10_000] * 3, generator)
    for tensor, row in zip(tensors, counts.rows.tolist(), strict=True):
        found, expected = exponents.histogram_of(row), plainly(tensor)
        assert list(found.counts) == list(expected.counts)
        assert (found.zeros, found.max_abs) == (expected.zeros, expected.max_abs)
    assert counts.looked_at == counts.sizes


def test_the_largest_is_found_where_a_sample_would_miss_it() -> None:
    gradient = torch.full((100_000,), 0.25)
    gradient[77_777] = -8.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        counts = exponents.sampled([gradient, gradient * 0.0], [10, 10], generator, 0.5)
        largest = [exponents.histogram_of(row).max_abs for row in counts.rows.tolist()]
        assert largest == [4.0, 0.0]


def test_the_stated_error_covers_the_exact_share() -> None:
    """In at least 95 % of 1000 draws, for rare and common shares, for rows that are all zero."""
    rows = spread(400, 256)
    rows[torch.arange(400) % 8 != 0] = 0.0  # an embedding of which few rows were used
    tensors = [rows, spread(60_000, seed=1) * 2.0**-14, spread(300, seed=2)]
    everything = torch.cat([tensor.reshape(-1) for tensor in tensors])
    half = everything.half()
    truth = np.array(
        [
            ((half == 0) & (everything != 0)).double().mean().item(),
            ((half != 0) & (everything.abs() < 2.0**-14)).double().mean().item(),
            torch.isinf(half).double().mean().item(),
            (everything == 0).double().mean().item(),
        ]
    )
    assert truth[2] < 0.001 < truth[0] < truth[1] < truth[3]
    generator = torch.Generator().manual_seed(3)
    total = everything.numel()
    draws = [-(-4096 * tensor.numel() // total) for tensor in tensors]
    # Columns of a row: exponents below -25 round to zero, below -14 are sub-normal, from 16 on
    # overflow; then the zeros.
    columns = [slice(0, 102), slice(102, 113), slice(143, 255), slice(256, 257)]
    covered = np.zeros(4)
    for _ in range(1000):
        counts = exponents.sampled(tensors, draws, generator)
        weights = np.array(counts.sizes) / np.array(counts.looked_at) / total
        rows_found = counts.rows.numpy()
        shares = np.array([(rows_found[:, each].sum(1) * weights).sum() for each in columns])
        reading = Reading([], counts.looked_at, counts.sizes, None)
        errors = [share_error(reading, range(3), share) for share in shares]
        covered += np.abs(shares - truth) <= errors
    assert (covered / 1000 >= 0.95).all()
    # And it says something: a few percent at most.
    assert share_error(reading, range(3), 0.5) < 0.03


def test_as_many_draws_as_values_are_no_count_of_all() -> None:
    # 4034 places of 4096, some of them twice, and a bias that is seen whole.
    reading = Reading([], [4034, 64], [4096, 64], None)
    assert 0.01 < share_error(reading, range(2), 0.5) < 0.02
    assert share_error(Reading([], [4096, 64], [4096, 64], None), range(2), 0.5) == 0.0


SCRIPT = """
import torch, random
torch.manual_seed(0)
random.seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(400, 32), torch.nn.Flatten(), torch.nn.Linear(128, 64), torch.nn.Tanh(),
    torch.nn.Linear(64, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
books = []
for step in range(1, 13):
    loss = model(torch.randint(0, 400, (16, 4))).pow(2).mean()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    truth = [p.grad / scale for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    if step == 8: model[2].bias.grad[3] = float("inf")
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer); scaler.update()
    flat = torch.cat([t.reshape(-1) for t in truth])
    moved = torch.cat([(p.detach() - b).reshape(-1) / b.reshape(-1) for p, b in
                       zip(model.parameters(), before)]).abs()
    last = torch.cat([(p.detach() - b).reshape(-1) / b.reshape(-1) for p, b in
                      zip(model[4].parameters(), before[3:])]).abs()
    print(step, flat.abs().max().item(), (flat == 0).double().mean().item(),
          ((flat * scale).half() == 0).double().mean().item() - (flat == 0).double().mean().item(),
          (moved < 2.0**-8).double().mean().item(), flat.numel(), scale,
          (last < 2.0**-8).double().mean().item())
    optimizer.zero_grad()
print(torch.rand(3), random.random(), loss.item().hex())
"""


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_shows_its_gradients(tmp_path: Path, forge: Forge, exact: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    listener, stdout, _ = run(
        forge, tmp_path, script, gradients_every=4, gradients_exact=exact, activations_every=4
    )
    lines = [line.split() for line in stdout.splitlines()[:12]]
    samples: list[GradientsSampled] = listener.of(GradientsSampled)
    assert [sample.step for sample in samples] == [2, 4, 8, 12]
    for sample in samples:
        largest, zeros, zeroed, small, values, scale, last = map(float, lines[sample.step - 1][1:])
        whole = sample.layers[0]
        assert whole.name == "all"
        assert [layer.name for layer in sample.layers[1:]] == ["0", "2", "4"]
        assert sample.loss_scale == scale
        assert whole.max_abs == pytest.approx(largest, rel=1e-6)
        assert whole.values == values == sum(layer.values for layer in sample.layers[1:])
        assert abs(whole.zeros - zeros) <= (1e-4 if exact else whole.error)
        fp16 = next(each for each in whole.shares if each.format == "fp16")
        assert abs(fp16.zeroed - zeroed) <= max(fp16.zeroed_error, 1e-4)
        assert (whole.error == 0.0) is exact
        if sample.step == 8:
            # A skipped step moved nothing: that is not an update of size zero.
            assert whole.update_small is None
            assert whole.non_finite == pytest.approx(1 / values, rel=1e-3) or not exact
        else:
            assert whole.update_small == pytest.approx(small, abs=0.1)
            # So few weights are all looked at.
            assert sample.layers[-1].update_small == pytest.approx(last)
        # No autocast here: nothing was made in 16 bits.
        assert (sample.stored_as, sample.note) == ("float32", "")
    headrooms = listener.of(ActivationsSampled)
    assert [each.step for each in headrooms] == [2, 4, 8, 12]
    assert {module.name for module in headrooms[0].modules} == {
        "0", "1", "2", "3", "4", "Sequential",
    }  # fmt: skip
    tanh = next(module for module in headrooms[-1].modules if module.name == "3")
    assert 0 < tanh.max_abs <= 1.0
    assert tanh.octaves is not None
    assert tanh.octaves >= 15.9
    if not exact:
        # Its own generator: losses and random numbers are those of an unwatched run.
        assert stdout == plain(forge, tmp_path / "plain", script)
    text = gradients_text(samples[-1], headrooms[-1])
    assert "2048 (now)" in text
    assert "every gradient counted" in text if exact else "sampled" in text


def test_the_table_of_nothing_says_so() -> None:
    assert "no gradients were sampled" in gradients_text(None, None)
    bare = GradientsSampled(step=1, layers=(LayerGradients(name="all", values=0, looked_at=0),))
    assert "all" in gradients_text(bare, None)
