"""Fronts, splits, monotonicity, recommendation: properties that must hold for any model."""

import itertools
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch.errors import UsageError
from mpwatch.planner.candidates import bulk_peaks, evaluate, setups, splits, table_front
from mpwatch.planner.cards import CARDS, find_card, half_formats
from mpwatch.planner.footprint import Setup, peak_moment
from mpwatch.planner.model import PlainModel, transformer
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import PRECISIONS, find_optimizer, find_precision
from mpwatch.planner.pareto import dominates, front, thin
from mpwatch.planner.plans import Budget, Limits
from mpwatch.planner.presets import param_fraction, simple_tree
from mpwatch.planner.survey import Survey, survey
from mpwatch.planner.timing import (
    best_accumulation,
    rates,
    traffic_copies,
    window_seconds,
)

SHAPE = transformer(layers=24, hidden=2048, heads=16, sequence=2048, vocabulary=50304)
POINTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30
)


def setup(**changes: object) -> Setup:
    """An ordinary setup with some fields changed."""
    fields = {
        "model": SHAPE,
        "numerics": find_precision("O1:bf16"),
        "optimizer": find_optimizer("adamw-fused"),
        **changes,
    }
    return Setup(**fields)


def peak(chosen: Setup, micro_batch: int, accumulation: int) -> float:
    """Peak bytes."""
    steps = moments(chosen, accumulating=accumulation > 1)
    return peak_moment(steps, micro_batch).bytes_at(micro_batch)


def test_dominance_keeps_duplicates() -> None:
    points = {"A": (10, 5), "B": (12, 4), "C": (12, 5), "D": (9, 9), "E": (10, 5)}
    kept = front(list(points.values()))
    assert {list(points)[index] for index in kept} == {"A", "B", "D", "E"}


@given(POINTS)
def test_front_is_exactly_the_undominated_points(points: list[tuple[int, int, int]]) -> None:
    slow = [i for i, p in enumerate(points) if not any(dominates(q, p) for q in points)]
    assert front(points) == slow
    flat = [point[:2] for point in points]
    slow = [i for i, p in enumerate(flat) if not any(dominates(q, p) for q in flat)]
    assert front(flat) == slow


@given(POINTS)
def test_thinning_leaves_something_within_the_tolerance_of_every_point(
    points: list[tuple[int, int, int]],
) -> None:
    shifted = [tuple(float(value + 1) for value in point) for point in points]
    kept = thin(shifted, range(len(shifted)), 0.01)
    for point in shifted:
        assert any(
            all(a <= b * 1.01 for a, b in zip(shifted[index], point, strict=True)) for index in kept
        )


@given(st.integers(1, 500), st.integers(1, 8), st.integers(1, 128))
def test_every_split_makes_the_batch_or_misses_it_least(
    batch: int, devices: int, most: int
) -> None:
    limits = Limits(batch=batch, devices=devices, max_accumulation=most)
    found = splits(limits)
    misses = {abs(b * n * devices - batch) for b, n in found}
    assert len(misses) == 1
    best = min(
        abs(b * n * devices - batch)
        for n in range(1, most + 1)
        for b in range(1, batch // (n * devices) + 2)
    )
    assert misses == {best}
    assert all(n <= most and b >= 1 for b, n in found)


def test_contradicting_bounds_are_named() -> None:
    with pytest.raises(UsageError, match="--min-micro-batch 100"):
        splits(Limits(batch=8, min_micro_batch=100))


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("attention", ["math", "sdpa"])
def test_memory_is_monotone_in_accumulation_checkpointing_and_sharding(
    precision: str, attention: str
) -> None:
    numerics = find_precision(precision)
    for checkpointing in ("none", "full"):
        chosen = setup(numerics=numerics, attention=attention, checkpointing=checkpointing)
        by_accumulation = [peak(chosen, 64 // n, n) for n in (2, 4, 8, 16, 32, 64)]
        assert by_accumulation == sorted(by_accumulation, reverse=True)
    kinds = ("full", "selective", "none") if attention == "math" else ("full", "none")
    for b, n in ((1, 1), (4, 1), (1, 8), (4, 8)):
        values = [
            peak(setup(numerics=numerics, attention=attention, checkpointing=kind), b, n)
            for kind in kinds
        ]
        assert values == sorted(values)
        sharded = [
            peak(setup(numerics=numerics, attention=attention, sharding=kind, devices=64), b, n)
            for kind in ("zero3", "zero2", "zero1", "ddp")
        ]
        assert sharded == sorted(sharded)


def test_the_second_micro_batch_may_raise_memory_and_does() -> None:
    """At a fixed micro-batch N = 2 keeps a whole gradient through forward: + 4P for the toy."""
    toy = transformer(layers=4, hidden=256, heads=4, sequence=128, vocabulary=1024, tied=False)
    chosen = setup(
        model=toy, numerics=find_precision("O0"), attention="math", cuda=False,
        optimizer=find_optimizer("adamw-loop"),
    )  # fmt: skip
    assert peak(chosen, 2, 2) - peak(chosen, 2, 1) == pytest.approx(4 * toy.parameters, rel=0.01)


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_buckets_of_ddp_stay_through_forward_whatever_n_is(sharding: str) -> None:
    chosen = setup(sharding=sharding, devices=8)
    assert peak(chosen, 8, 1) == peak(chosen, 8, 2)
    alone = setup()
    assert peak(alone, 8, 1) < peak(alone, 8, 2)


def test_gradients_travel_in_their_own_width() -> None:
    """O1 keeps fp32 gradients, which DDP moves as they are; FSDP moves the compute type."""
    o1, o2 = find_precision("O1:bf16"), find_precision("O2:bf16")
    copies = {
        (numerics.name, kind): rates(
            setup(numerics=numerics, sharding=kind, devices=8), find_card("H100")
        ).gradient_copy  # type: ignore[union-attr]
        for numerics in (o1, o2)
        for kind in ("ddp", "zero3")
    }
    assert copies["O1:bf16", "ddp"] == 2 * copies["O2:bf16", "ddp"]
    assert copies["O1:bf16", "zero3"] == copies["O2:bf16", "zero3"]


@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("band", [0, 1, 2])
def test_time_per_sample_never_rises_with_accumulation(sharding: str, band: int) -> None:
    chosen = setup(sharding=sharding, devices=1 if sharding == "none" else 8)
    speed = rates(chosen, find_card("H100"), band)
    assert speed is not None
    times = [window_seconds(speed, sharding, 4, n) / n for n in (1, 2, 4, 8, 64)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))


def test_traffic_per_window_in_copies_of_the_gradient() -> None:
    copies = {
        (kind, n): traffic_copies(kind, n)
        for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp-no-sync")
        for n in (1, 4, 8)
    }
    assert [copies["ddp", n] for n in (1, 4, 8)] == [2, 2, 2]
    assert traffic_copies("ddp", 4, no_sync=False) == 8
    assert [copies["zero2", n] for n in (1, 4, 8)] == [2, 5, 9]
    saved = [1 - copies["fsdp-no-sync", n] / copies["zero3", n] for n in (4, 8)]
    assert saved == [pytest.approx(0.25), pytest.approx(0.2917, abs=1e-4)]


def test_accumulation_that_reaches_the_target_soonest() -> None:
    assert best_accumulation(0.2, 100) == pytest.approx(4.47, abs=0.01)
    assert best_accumulation(0.05, 16) == 1
    assert best_accumulation(1, 64) == 8


def test_bulk_and_single_estimates_agree() -> None:
    micro_batches = np.arange(1, 40)
    for accumulating in (False, True):
        steps = moments(setup(), accumulating=accumulating)
        single = [peak_moment(steps, int(b)).bytes_at(int(b)) for b in micro_batches]
        assert bulk_peaks(steps, micro_batches) == pytest.approx(single)


def test_a_hundred_thousand_candidates_in_a_second() -> None:
    card = find_card("H100")
    choices = setups(SHAPE, card, Limits(batch=8, devices=64))
    parts = [(b, n) for n in range(1, 129) for b in (1, 2, 4, 8, 16, 32, 64)]
    parts *= 1 + 100_000 // (len(choices) * len(parts))
    begin = time.process_time()
    table = evaluate(choices, parts, card, Budget(memory_bytes=card.memory_bytes))
    kept = table_front(table, np.arange(len(table)))
    elapsed = time.process_time() - begin
    assert len(table) >= 100_000
    assert elapsed <= 1.0
    assert kept


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_bulk_front_equals_the_plain_one(seed: int) -> None:
    generator = np.random.default_rng(seed)
    card = find_card("3090")
    choices = setups(SHAPE, card, Limits(batch=8))
    parts = [(int(b), int(n)) for b, n in generator.integers(1, 9, size=(6, 2))]
    table = evaluate(choices, parts, card, Budget(memory_bytes=card.memory_bytes))
    rows = generator.permutation(len(table))[:80]
    points = list(zip(table.peak_bytes[rows], table.seconds[rows], strict=True))
    assert sorted(table_front(table, rows)) == sorted(int(rows[i]) for i in front(points))


def test_turing_gets_no_bf16_and_ampere_does() -> None:
    assert half_formats(find_card("T4")) == ("fp16",)
    assert half_formats(find_card("3090"))[0] == "bf16"
    with pytest.raises(UsageError, match="T4 has no fast bf16"):
        setups(SHAPE, find_card("t4"), Limits(batch=8, precisions=("O1:bf16",)))


def test_unknown_card_lists_near_names() -> None:
    with pytest.raises(UsageError, match="A100"):
        find_card("A1OO")
    assert {card.capability for card in CARDS.values()} >= {(7, 5), (8, 0), (9, 0)}


def test_120_gb_of_states_never_fit_80_gb() -> None:
    model = transformer(
        layers=32, hidden=4416, heads=32, sequence=2048, vocabulary=50304, parameters=7_500_000_000
    )
    answer = survey(
        model,
        find_card("80GB"),
        Budget(memory_bytes=80 * 10**9),
        Limits(batch=64, families=("exact",)),
    )
    assert answer.recommended is None
    assert "need 120 GB" in answer.reason
    assert "accumulation cannot help" in answer.reason
    assert answer.plans
    assert not any(plan.fits for plan in answer.plans)


def test_uncertainty_is_carried_into_the_answer() -> None:
    """A robust plan is on the front at both ends of the time band; so is some plan always."""
    card = find_card("3090")
    limits = Limits(batch=64, noise_scale=(300.0, 600.0))
    answer = survey(SHAPE, card, Budget(memory_bytes=card.memory_bytes), limits)
    assert answer.samples_factor == (1 + 64 / 600, 1 + 64 / 300)
    assert any(plan.robust for plan in answer.front)
    assert not any(plan.robust for plan in answer.plans if not plan.fits)
    assert answer.soonest_accumulation is not None
    low, high = answer.soonest_accumulation
    assert 1 <= low <= high
    for plan in answer.plans:
        assert plan.time_per_sample_s is not None
        assert plan.time_per_sample_range_s is not None
        best, worst = plan.time_per_sample_range_s
        assert best < plan.time_per_sample_s < worst


def test_exact_family_is_preferred_where_it_fits() -> None:
    """A faster LoRA plan exists on an H100; the learning problem is not changed for speed."""
    card = find_card("H100")
    answer = survey(SHAPE, card, Budget(memory_bytes=card.memory_bytes), Limits(batch=64))
    assert answer.recommended is not None
    assert answer.recommended.family == "exact"
    assert any(plan.family == "lora" and plan.fits for plan in answer.plans)
    assert answer.plans[: len(answer.front)] == answer.front


def test_a_model_known_by_its_size_says_that_activations_are_unknown() -> None:
    card = find_card("24GB")
    answer = survey(
        PlainModel(parameters=10**8), card, Budget(memory_bytes=card.memory_bytes), Limits(batch=8)
    )
    assert answer.recommended is not None
    assert answer.recommended.labels["activations"] == "unknown"
    assert {plan.micro_batch for plan in answer.plans} == {1}
    assert "activations are unknown" in answer.reason
    assert answer.recommended.time_per_sample_s is None


def test_articles_tree_finds_a_fit_where_there_is_none() -> None:
    """80 GB, 7.5e9 parameters: 126, 105, 84, then 73.5 GB `fits`; 16 bytes each are 120 GB."""
    plan = simple_tree(80e9, 7.5e9)
    needed = [step.needed_bytes / 1e9 for step in plan.tests]
    assert needed == [pytest.approx(value) for value in (126, 105, 84, 73.5)]
    assert (plan.precision, plan.accumulation) == ("mixed", 4)
    assert simple_tree(60e9, 7.5e9).precision is None
    assert simple_tree(130e9, 7.5e9).precision == "fp32"


def test_articles_batch_floor_asks_for_millions_of_samples() -> None:
    assert param_fraction(7e9) == (pytest.approx(7e6), pytest.approx(35e6))


def reasoned(card: str, cuda: bool = True, **changes: Any) -> Survey:
    """A survey of a small model on a card given by its size."""
    shape = transformer(layers=24, hidden=1024, heads=16, sequence=1024, vocabulary=50304)
    size = round(float(card.removesuffix("GB")) * 1e9)
    budget = Budget(memory_bytes=size, context_bytes=600_000_000 if cuda else 0)
    return survey(shape, find_card(card), budget, Limits(cuda=cuda, **{"batch": 32, **changes}))


def test_what_is_said_not_to_fit_is_told_apart_from_what_is_taken() -> None:
    """As many samples at once, other attention: the row taken was said to be too large."""
    answer = reasoned("200GB", precisions=("O1:bf16",))
    chosen = answer.recommended
    assert chosen is not None
    assert (chosen.precision, chosen.micro_batch, chosen.accumulation_steps) == ("O1:bf16", 32, 1)
    failed = [rung for rung in answer.rungs if not rung.fits]
    for rung in failed:
        assert rung.at() in answer.reason
        assert rung.setup.attention != chosen.attention
    assert "without any concession" not in answer.reason


def test_sizes_are_told_with_as_many_figures_as_it_takes() -> None:
    """A peak just over what is usable does not read as what is usable."""
    rungs = reasoned("8GB", precisions=("O1:bf16",), families=("exact",)).rungs
    peak = rungs[-1].peak_bytes
    # Another 0.02 % of the peak is missing: three figures cannot tell.
    memory = f"{(peak * 0.9998 + 1.1e9) / 1e9:.6f}GB"
    answer = reasoned(memory, precisions=("O1:bf16",))
    assert " that are usable" in answer.reason
    sizes = re.findall(r"([0-9.]+) GB", answer.reason.split(" that are usable")[0])
    assert float(sizes[-2]) > float(sizes[-1])


def test_the_fastest_is_the_fastest_of_what_was_looked_at() -> None:
    """`within 1 % of the fastest` beside `34 times as long as` another: not in one sentence."""
    answer = reasoned("8.4GB", families=("exact", "lora"))
    chosen = answer.recommended
    assert chosen is not None
    assert chosen.relative_time is not None
    assert chosen.relative_time > 2
    assert f"{chosen.relative_time:.1f} times as long as" in answer.reason
    assert re.search(r"of the \d+ plans of family exact that fit", answer.reason) or (
        "the only plan of family exact that fits" in answer.reason
    )


def test_on_a_processor_fp32_is_kept_and_that_is_the_reason() -> None:
    answer = reasoned("200GB", cuda=False)
    assert answer.recommended is not None
    assert answer.recommended.precision == "O0"
    assert "16 bits are not known to be faster" in answer.reason
    assert "O1:bf16" not in answer.reason
