"""What is asked and what is answered: the request, a plan, and the budget it must stay in.

Plans carry, beside every number, where it comes from: measured, tracked, estimated or unknown.
"""

from typing import Any

from msgspec import Struct, structs

from mpwatch.errors import UsageError
from mpwatch.planner.cards import Card
from mpwatch.planner.footprint import Setup, binding_term, peak_moment, phase_peaks
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import EIGHT_BIT, EXACT, LORA, PURE_HALF, RISKS
from mpwatch.planner.timing import rates, window_seconds

MEASURED, TRACKED, ESTIMATED, UNKNOWN = "measured", "tracked", "estimated", "unknown"
CONTEXT_BYTES = 600_000_000
"""CUDA context and library workspaces where NVML has not measured them; judgement."""
LEAST_MARGIN_BYTES = 500_000_000
MARGIN_SHARE = 0.05
MOST_ACCUMULATION = 65_536


class Budget(Struct, frozen=True, kw_only=True):
    """Device memory and what is set aside of it."""

    memory_bytes: int
    context_bytes: int = CONTEXT_BYTES
    """0 where the figure is free memory asked with a context already there."""

    def needed(self, peak_bytes: float) -> float:
        """Peak, context, and a margin of 5 % (at least 0.5 GB) for fragmentation and rounding."""
        return peak_bytes + self.context_bytes + max(MARGIN_SHARE * peak_bytes, LEAST_MARGIN_BYTES)

    def fits(self, peak_bytes: float) -> bool:
        """Whether a predicted peak stays inside."""
        return self.needed(peak_bytes) <= self.memory_bytes

    @property
    def largest_peak(self) -> float:
        """The largest peak that fits."""
        room = self.memory_bytes - self.context_bytes
        by_share = room / (1 + MARGIN_SHARE)
        return min(by_share, room - LEAST_MARGIN_BYTES)


class Limits(Struct, frozen=True, kw_only=True):
    """What the person allows."""

    batch: int
    """B, samples per optimizer step over all devices"""
    devices: int = 1
    max_accumulation: int = 128
    min_batch: int = 1
    min_micro_batch: int = 1
    families: tuple[str, ...] = (EXACT, EIGHT_BIT, LORA, PURE_HALF)
    precisions: tuple[str, ...] = ()
    """empty: whatever the card runs well"""
    optimizer: str = "adamw"
    lora_rank: int = 8
    cuda: bool = True
    """CUDA's memory rules; False: torch's CPU kernels"""
    noise_scale: tuple[float, float] | None = None
    """phi, ends of its interval; None is unknown"""

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 10**9:
            raise UsageError(f"--batch {self.batch} is out of range: 1 to 1e9")
        if not 1 <= self.devices <= 10**6:
            raise UsageError(f"--devices {self.devices} is out of range: 1 to 1e6")
        for name in ("max_accumulation", "min_batch", "min_micro_batch", "lora_rank"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {getattr(self, name)} must be at least 1")
        if self.max_accumulation > MOST_ACCUMULATION:
            raise UsageError(
                f"--max-accumulation {self.max_accumulation} is out of range: 1 to"
                f" {MOST_ACCUMULATION}"
            )


class Plan(Struct, frozen=True, kw_only=True):
    """One configuration with what it costs; the documented row of `plan --json`."""

    family: str
    precision: str
    optimizer: str
    micro_batch: int
    accumulation_steps: int
    checkpointing: str
    attention: str
    sharding: str
    devices: int
    batch: int
    """b N D"""
    batch_deviation: int
    """batch minus the one asked for"""
    peak_bytes: int
    needed_bytes: int
    """peak with context and margin: this is compared with the device"""
    fits: bool
    binding: str
    phase_bytes: dict[str, int]
    terms_bytes: dict[str, int]
    time_per_sample_s: float | None
    time_per_sample_range_s: tuple[float, float] | None
    relative_time: float | None
    """over the fastest plan shown; also where seconds are unknown"""
    risk: str
    robust: bool = False
    """on the front at both ends of the time band, not only in its middle"""
    labels: dict[str, str]
    estimated_peak_bytes: int | None = None
    """what was estimated before this very plan was tracked; None where it was not"""


def as_tracked(plan: Plan, budget: Budget, tracked_bytes: int, phase_bytes: dict[str, int]) -> Plan:
    """The plan with the peaks of its own tracked run in place of the estimates."""
    return structs.replace(
        plan,
        peak_bytes=tracked_bytes,
        estimated_peak_bytes=plan.peak_bytes,
        needed_bytes=round(budget.needed(tracked_bytes)),
        fits=budget.fits(tracked_bytes),
        phase_bytes=phase_bytes,
        labels={**plan.labels, "peak_bytes": TRACKED},
    )


def disagreement(plan: Plan) -> float | None:
    """Relative difference of estimate and tracked run; None where only one is known."""
    if plan.estimated_peak_bytes is None:
        return None
    return abs(plan.estimated_peak_bytes - plan.peak_bytes) / plan.peak_bytes


def family_of(setup: Setup) -> str:
    """The family a setup belongs to: the most intrusive of what it changes."""
    if setup.lora_rank is not None:
        return LORA
    if setup.numerics.level == "O3":
        return PURE_HALF
    return EIGHT_BIT if setup.optimizer.block is not None else EXACT


def seconds_per_sample(setup: Setup, card: Card, b: Any, n: Any, band: int) -> Any:
    """Seconds per sample over all devices; None where nothing is known about the work."""
    speed = rates(setup, card, band)
    if speed is None:
        return None
    return window_seconds(speed, setup.sharding, b, n) / (n * b * setup.devices)


def make_plan(
    setup: Setup,
    micro_batch: int,
    accumulation: int,
    *,
    card: Card,
    budget: Budget,
    batch: int | None = None,
) -> Plan:
    """Everything about one configuration; `batch` is the one asked for."""
    steps = moments(setup, accumulating=accumulation > 1)
    peak = peak_moment(steps, micro_batch)
    peak_bytes = peak.bytes_at(micro_batch)
    times = [seconds_per_sample(setup, card, micro_batch, accumulation, band) for band in range(3)]
    timed = card.timed and times[1] is not None
    total = micro_batch * accumulation * setup.devices
    family = family_of(setup)
    return Plan(
        family=family,
        precision=setup.numerics.name,
        optimizer=setup.optimizer.name,
        micro_batch=micro_batch,
        accumulation_steps=accumulation,
        checkpointing=setup.checkpointing,
        attention=setup.attention,
        sharding=setup.sharding,
        devices=setup.devices,
        batch=total,
        batch_deviation=total - (batch if batch is not None else total),
        peak_bytes=round(peak_bytes),
        needed_bytes=round(budget.needed(peak_bytes)),
        fits=budget.fits(peak_bytes),
        binding=binding_term(steps, micro_batch),
        phase_bytes={name: round(v) for name, v in phase_peaks(steps, micro_batch).items()},
        terms_bytes={k: round(v) for k, v in peak.terms_at(micro_batch).items() if v},
        time_per_sample_s=times[1] if timed else None,
        time_per_sample_range_s=(times[0], times[2]) if timed else None,
        relative_time=None,
        risk=RISKS[family],
        labels={
            "peak_bytes": ESTIMATED,
            "time_per_sample_s": ESTIMATED if timed else UNKNOWN,
            "samples_to_target": UNKNOWN,
        },
    )
