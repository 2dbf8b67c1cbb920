"""Exponent histograms: against exact rounding to each format, and the reference of two million."""

import math

import numpy as np
import pytest
import torch

from mpwatch_agent import distribution
from mpwatch_agent.distribution import BINS, FP16, Histogram


def histogram_of(values: torch.Tensor) -> Histogram:
    """Counted the plain way, independent of how the agent counts."""
    magnitudes = values.abs().numpy()
    counts = [0] * BINS
    exponents = np.frexp(magnitudes[magnitudes > 0])[1] - 1
    for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
        counts[max(0, int(exponent) + distribution.BIAS)] += int(count)
    return Histogram(counts, int((magnitudes == 0).sum()), float(magnitudes.max()))


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    """2e6 values 2^N(-22, 4)."""
    draws = np.random.default_rng(0).normal(-22, 4, 2_000_000)
    return torch.from_numpy(np.exp2(draws).astype(np.float32))


def test_the_reference_distribution_in_all_digits(reference: torch.Tensor) -> None:
    found = histogram_of(reference)
    assert round(found.max_abs, 4) == 0.2487
    limits = []
    for headroom in (1, 2, 4, 16):
        proposal = distribution.propose(found, headroom=headroom)
        assert proposal is not None
        limits.append(proposal.limit)
    assert limits == [18, 17, 16, 14]
    at = {k: distribution.shares(found, scale=2.0**k) for k in (0, 7, 10, 15, 16)}
    zeroed = [at[k].zeroed for k in (0, 7, 10, 15)]
    assert zeroed == pytest.approx([0.226412, 0.006240, 0.000576, 6e-6], abs=6e-7)
    subnormal = [at[0].subnormal, at[10].subnormal, at[16].subnormal]
    assert subnormal == pytest.approx([0.750572, 0.307344, 0.022612], abs=6e-7)
    for k, shares in at.items():
        rounded = (reference * 2.0**k).half()
        assert shares.zeroed == (rounded == 0).double().mean().item()
        assert shares.overflowed == 0.0
    best = distribution.propose(found)
    assert best is not None
    assert best.best == 10  # the first power of two with at most 1e-3 zeroed
    assert best.scale == 2.0**16


@pytest.mark.parametrize("target", distribution.FORMATS, ids=lambda each: each.name)
def test_shares_are_what_rounding_does(target: distribution.Format) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(target.name) or getattr(
        torch, f"float8_{target.name}"
    )
    generator = torch.Generator().manual_seed(1)
    # fp32 sub-normals share one bin, so bf16 is judged above them.
    spread = 60 if target.name == "bf16" else 8
    exponents = torch.randn(20_000, generator=generator) * spread + target.normal
    values = torch.exp2(exponents).clamp(max=3.3e38)
    if target.name == "bf16":
        values = values[values >= 2.0**-126]
    values = values[values <= target.largest]
    shares = distribution.shares(histogram_of(values), target)
    back = values.to(dtype).float()
    assert shares.zeroed == (back == 0).double().mean().item()
    assert shares.overflowed == 0.0
    # A value just below the smallest normal one may round up to it.
    below = ((back != 0) & (values < 2.0**target.normal)).double().mean().item()
    assert shares.subnormal == pytest.approx(below, abs=1e-4)


def test_overflow_begins_where_fp16_does() -> None:
    for value, overflows in ((65504.0, False), (65519.9, False), (65520.0, True), (1e30, True)):
        shares = distribution.shares(histogram_of(torch.tensor([value, 1.0])))
        assert (shares.overflowed > 0) is overflows
        assert torch.isinf(torch.tensor(value).half()).item() is overflows


def test_nothing_is_proposed_for_nothing() -> None:
    assert distribution.propose(histogram_of(torch.zeros(4))) is None
    assert distribution.shares(Histogram([0] * BINS, 0, 0.0)).zeroed == 0.0


def test_a_range_that_no_scale_holds_has_no_best_scale() -> None:
    wide = torch.cat([torch.full((50,), 2.0**-60), torch.full((50,), 2.0**10)])
    proposal = distribution.propose(histogram_of(wide))
    assert proposal is not None
    assert not proposal.fits
    assert distribution.range_octaves(histogram_of(wide)) == 70.0
    narrow = distribution.propose(histogram_of(torch.full((50,), 1.5 * 2.0**-30)), FP16)
    assert narrow is not None
    # 1.5 * 2^-30 times 2^5 rounds to 2^-24, the smallest value of fp16; times 2^4 to zero.
    assert narrow.best == 5
    assert math.ldexp(1.0, narrow.limit) * 1.5 * 2.0**-30 * 4 <= 65504
