"""The loss scaler against what the projects' own code does, written out here from their sources."""

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpwatch_agent.scaler_guide import best_scale
from mpwatch_agent.scaler_presets import LOWEST, PRESETS, policy_of
from mpwatch_agent.scaling import LossScaler

Overflowed = Callable[[bool], float]


def windows(seed: int, count: int, share: float) -> list[bool]:
    """Random windows, overflows in rows as often as alone."""
    numbers = random.Random(seed)
    found: list[bool] = []
    while len(found) < count:
        found += [numbers.random() < share] * numbers.choice([1, 1, 2, 5, 40])
    return found[:count]


def torch_steps(init: float, up: float, down: float, interval: int) -> Overflowed:
    """torch's own update of the scale, on tensors."""
    scale, tracker = torch.full((), init), torch.zeros((), dtype=torch.int32)

    def step(overflowed: bool) -> float:
        found = torch.full((), float(overflowed))
        torch._amp_update_scale_(scale, tracker, found, up, down, interval)
        return scale.item()

    return step


@pytest.mark.parametrize(
    ("init", "up", "down", "interval", "share"),
    [
        (2.0**16, 2.0, 0.5, 2000, 0.0002),
        (2.0**16, 2.0, 0.5, 7, 0.11),
        (3.7, 1.7, 0.37, 3, 0.13),
        (2.0**16, 2.0, 0.5, 1, 0.45),
    ],
)
def test_torch_preset_is_torch(
    init: float, up: float, down: float, interval: int, share: float
) -> None:
    knobs = {"growth_factor": up, "backoff_factor": down, "growth_interval": interval}
    policy = policy_of("torch", init_scale=init, **knobs)
    ours, theirs = LossScaler(policy), torch_steps(init, up, down, interval)
    compared = 0
    for overflowed in windows(interval, 12_000, share):
        expected = theirs(overflowed)
        if expected < LOWEST:
            # Here torch goes on to a scale whose reciprocal is inf; that is where we part.
            ours, theirs = LossScaler(policy), torch_steps(init, up, down, interval)
            continue
        assert ours.update(overflowed).after == expected
        compared += 1
    assert compared >= 10_000


class DeepSpeed:
    """`DynamicLossScaler.update_scale`, hysteresis 2; an exception at the floor is a "stay"."""

    def __init__(self, consecutive: bool) -> None:
        self.scale, self.at, self.last, self.patience = 2.0**16, 0, -1, 2
        self.consecutive = consecutive

    def __call__(self, overflowed: bool) -> float:
        if overflowed:
            if self.patience == 1:
                self.scale = max(self.scale / 2, 1.0)
            else:
                self.patience -= 1
            self.last = self.at
        else:
            if self.consecutive:
                self.patience = 2
            if (self.at - self.last) % 1000 == 0:
                self.patience = self.patience if self.consecutive else 2
                self.scale *= 2
        self.at += 1
        return self.scale


class Megatron:
    """`DynamicGradScaler.update`."""

    def __init__(self) -> None:
        self.scale, self.growth, self.patience = 2.0**32, 0, 2

    def __call__(self, overflowed: bool) -> float:
        if overflowed:
            self.growth = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == 1000:
                self.growth, self.patience = 0, 2
                self.scale *= 2
        return self.scale


class Apex:
    """`LossScaler.update_scale`, dynamic."""

    def __init__(self) -> None:
        self.scale, self.unskipped = 2.0**16, 0

    def __call__(self, overflowed: bool) -> float:
        if overflowed:
            self.scale, self.unskipped = self.scale / 2, 0
        else:
            self.unskipped += 1
        if self.unskipped == 2000:
            self.scale, self.unskipped = min(2.0**24, self.scale * 2), 0
        return self.scale


class Fairseq:
    """`DynamicLossScaler` of the command line, update_freq 3, one worker."""

    def __init__(self) -> None:
        self.scale, self.at, self.last, self.interval = 2.0**7, 0, -1, int(2**14 / 3)

    def __call__(self, overflowed: bool) -> float:
        if overflowed:
            before, self.last = self.scale, self.at
            self.scale /= 2
            if self.scale <= 1e-4:
                self.scale = before
            self.at += 1
            return self.scale
        if (self.at - self.last) % self.interval == 0:
            self.scale *= 2
        self.at += 1
        return self.scale


@pytest.mark.parametrize(
    ("name", "knobs", "theirs", "micro_batches"),
    [
        ("deepspeed", {}, DeepSpeed(consecutive=False), 1),
        ("deepspeed", {"consecutive": True}, DeepSpeed(consecutive=True), 1),
        ("megatron", {}, Megatron(), 1),
        ("apex", {}, Apex(), 1),
        ("fairseq", {}, Fairseq(), 3),
    ],
)
def test_presets_are_what_their_projects_do(
    name: str, knobs: dict[str, Any], theirs: Overflowed, micro_batches: int
) -> None:
    ours = LossScaler(policy_of(name, **knobs))
    seen = set()
    # Long clean stretches that let the scale grow, then rows that press it on its floor.
    for share in (0.0, 0.0003, 0.002, 0.0, 1.0, 0.0, 0.001):
        for overflowed in windows(int(share * 1e4), 20 if share == 1 else 18_000, share):
            after = ours.update(overflowed, micro_batches=micro_batches).after
            assert after == theirs(overflowed)
            seen.add(after)
    assert len(seen) > 10


def skip_rate(name: str, spread: float, **knobs: Any) -> float:
    """20 000 windows, largest gradient 0.9 x 2^-6, times a log-normal of `spread` octaves."""
    numbers = random.Random(0)
    scaler = LossScaler(policy_of(name, **knobs))
    skipped = 0
    for _ in range(20_000):
        peak = 0.9 * 2**-6 * 2 ** (spread * numbers.gauss(0, 1))
        overflowed = peak * scaler.scale >= 65520
        skipped += overflowed
        scaler.update(overflowed, peak=peak)
    return skipped / 20_000


def test_skip_rates_are_the_published_ones() -> None:
    assert skip_rate("doubling", 0) == pytest.approx(0.4997, abs=3e-4)
    assert skip_rate("doubling", 1) == pytest.approx(0.4992, abs=8e-4)
    assert skip_rate("doubling", 0, ceiling=2.0**15) == 0
    assert skip_rate("torch", 0) == pytest.approx(1.5e-4)
    assert skip_rate("apex", 0) == pytest.approx(1.5e-4)
    assert skip_rate("deepspeed", 0) == pytest.approx(1.3e-3, abs=1e-4)
    assert skip_rate("megatron", 0) == pytest.approx(2.45e-3, abs=1e-4)
    assert skip_rate("torch", 1) == pytest.approx(2.5e-4, abs=2e-4)
    assert skip_rate("histogram", 1) <= skip_rate("torch", 1)
    assert PRESETS["doubling"].expected_skip_rate() == 0.5
    assert PRESETS["torch"].expected_skip_rate() == pytest.approx(5e-4, rel=1e-2)


@pytest.mark.parametrize("name", PRESETS)
def test_no_scale_can_make_a_nan_and_one_hears_long_before(name: str) -> None:
    scaler = LossScaler(policy_of(name))
    said: list[tuple[str, float]] = []
    for _ in range(400):
        update = scaler.update(True)
        said += [(word, update.after) for word in (update.reached, update.pressed) if word]
    inverse = torch.full((), scaler.scale).double().reciprocal().float()
    assert math.isfinite(inverse.item())
    assert (torch.zeros(3) * inverse).tolist() == [0, 0, 0]
    assert said[0][0] == "low"
    # At least three halvings remain, or the floor is where a scale of 1 is.
    assert said[0][1] >= 8 * scaler.scale
    assert [word for word, _ in said].count("floor") <= 2


def test_limits_are_said_once_and_again_after_leaving_them() -> None:
    scaler = LossScaler(
        policy_of("torch", init_scale=8.0, floor=2.0, ceiling=16.0, growth_interval=1)
    )
    came = [False] * 3 + [True] * 5 + [False] * 4 + [True] + [False] * 3
    updates = [scaler.update(overflowed) for overflowed in came]
    assert [u.after for u in updates] == [16, 16, 16, 8, 4, 2, 2, 2, 4, 8, 16, 16, 8, 16, 16, 16]
    told = {index: (u.reached, u.pressed) for index, u in enumerate(updates)}
    assert {index: words for index, words in told.items() if any(words)} == {
        0: ("ceiling", ""),
        1: ("", "ceiling"),
        5: ("floor", ""),
        6: ("", "floor"),
        10: ("ceiling", ""),
        11: ("", "ceiling"),
        13: ("ceiling", ""),
        14: ("", "ceiling"),
    }


def test_interval_in_samples_follows_the_window_as_it_changes() -> None:
    scaler = LossScaler(policy_of("torch", growth_interval=64, interval_unit="samples"))
    changes = [scaler.update(False, samples=8).change for _ in range(8)]
    assert changes == [""] * 7 + ["grew"]
    # Half way through, the window doubles: half as many windows are left.
    changes = [scaler.update(False, samples=8).change for _ in range(4)]
    changes += [scaler.update(False, samples=16).change for _ in range(2)]
    assert changes == [""] * 5 + ["grew"]


def test_histogram_comes_down_at_once_and_forgets_a_bad_batch() -> None:
    scaler = LossScaler(policy_of("histogram"))
    peak = 0.01
    largest = 65504 / (4 * peak)
    skipped = 0
    for _ in range(10):
        overflowed = peak * 2**12 * scaler.scale >= 65520
        skipped += overflowed
        scaler.update(overflowed, peak=peak * 2**12)
    assert skipped <= 3
    scaler = LossScaler(policy_of("histogram"))
    scaler.update(False, peak=peak)
    assert largest / 2 < scaler.scale <= largest
    assert scaler.scale == best_scale(peak)
    for _ in range(30):
        scaler.update(True)
    assert scaler.update(False, peak=peak).after == best_scale(peak)
    # Coming back again and again they are believed.
    for _ in range(8):
        scaler.update(True)
    assert scaler.update(False, peak=peak).after < 1e-6 * best_scale(peak)


@pytest.mark.parametrize("name", PRESETS)
def test_state_goes_on_where_it_was_taken(name: str) -> None:
    found = windows(5, 4000, 0.05)
    straight, first = LossScaler(policy_of(name)), LossScaler(policy_of(name))
    for index, overflowed in enumerate(found):
        peak = 0.001 * (1 + index % 7)
        straight.update(overflowed, peak=peak)
        if index == 1777:
            second = LossScaler(policy_of(name))
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first = second
        first.update(overflowed, peak=peak)
        assert first.scale == straight.scale
    assert first.state_dict() == straight.state_dict()
    assert first.overflow_total == sum(found)
    with pytest.raises(ValueError, match="state of scaler"):
        first.load_state_dict({"policy": "nobody"})


def test_a_scale_set_by_hand_and_bad_knobs() -> None:
    scaler = LossScaler(policy_of("histogram"))
    scaler.adopt(256.0, hold=True)
    assert scaler.update(False, peak=1e-6).after == 256.0
    for scale in (0.0, math.inf, math.nan, -2.0, 2.0**127):
        with pytest.raises(ValueError, match="scale"):
            scaler.adopt(scale)
    for knobs in (
        {"floor": 8.0, "ceiling": 4.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"at_floor": "checkpoint"},
        {"at_ceiling": "explode"},
        {"init_scale": 0.0},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            policy_of("torch", **knobs)
