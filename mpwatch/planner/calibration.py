"""Turns tracked runs of a module into a model that answers for every micro-batch between them.

Memory at a fixed configuration is the largest of a few affine functions of the micro-batch, so it
is convex: the chord between two tracked runs is exact at its ends and never below in between.
Pure; the runs come from the tracking child.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from mpwatch.planner.footprint import Setup, static_terms
from mpwatch.planner.model import Growth, TrackedModel, growth_key
from mpwatch.planner.numerics import find_optimizer, find_precision

PHASES = ("forward", "backward")
OWN_TERMS = ("casts", "logits")
CALIBRATION_OPTIMIZER = "sgd"
"""Without states: growth is what lies above them, and fewer operators run."""


class RunConfiguration(Struct, frozen=True, kw_only=True):
    """What the child is asked to run."""

    precision: str
    micro_batch: int
    accumulation_steps: int
    checkpointing: str
    optimizer: str


class RunPhase(Struct, frozen=True, kw_only=True):
    """The peak of one phase, by owner, in bytes."""

    phase: str
    peak_bytes: int
    owners: dict[str, int]


class Run(Struct, frozen=True, kw_only=True):
    """One tracked configuration."""

    configuration: RunConfiguration
    peak_bytes: int
    phases: tuple[RunPhase, ...]
    parameters: int
    trained: int
    buffer_bytes: int
    largest: int
    block_parameters: int = 0
    root_parameters: int = 0


def wanted_runs(
    precisions: Sequence[str],
    splits: Sequence[tuple[int, int]],
    optimizer: str = CALIBRATION_OPTIMIZER,
) -> list[RunConfiguration]:
    """Runs that bracket all splits, the likeliest variants first.

    O3 is not run: above its static bytes it keeps what O2 keeps.
    """
    single = sorted({b for b, n in splits if n == 1})
    repeated = sorted({b for b, n in splits if n > 1})
    points = [(b, 2) for b in sorted({*repeated[:1], *repeated[-1:]})]
    points += [(b, 1) for b in sorted({*single[:1], *single[-1:]})]
    names = [name for name in precisions if not name.startswith("O3")]
    return [
        RunConfiguration(
            precision=name,
            micro_batch=b,
            accumulation_steps=n,
            checkpointing=checkpointing,
            optimizer=optimizer,
        )
        for checkpointing in ("none", "full")
        for name in names
        for b, n in points
    ]


def _bare_model(run: Run) -> TrackedModel:
    return TrackedModel(
        parameters=run.parameters,
        trained=run.trained,
        buffer_bytes=run.buffer_bytes,
        largest=run.largest,
        growth={},
    )


def _growth_terms(run: Run, phase: RunPhase) -> dict[str, float]:
    """Bytes of a phase's peak above the static terms, by kind; they sum to the peak exactly."""
    configuration = run.configuration
    setup = Setup(
        model=_bare_model(run),
        numerics=find_precision(configuration.precision),
        optimizer=find_optimizer(configuration.optimizer),
    )
    static = static_terms(setup, accumulating=configuration.accumulation_steps > 1)
    terms = {name: float(phase.owners.get(name, 0)) for name in OWN_TERMS}
    terms["gradients"] = max(0.0, phase.owners.get("gradients", 0) - static["gradients"])
    terms["activations"] = phase.peak_bytes - sum(static.values()) - sum(terms.values())
    return terms


def _chord(
    phase: str, low: tuple[int, dict[str, float]], high: tuple[int, dict[str, float]]
) -> Growth:
    """The affine function through two runs, term by term."""
    (b0, start), (b1, end) = low, high
    slope = {name: (end[name] - start[name]) / (b1 - b0) for name in start}
    fixed = {name: start[name] - slope[name] * b0 for name in start}
    return Growth(phase=phase, fixed=fixed, per_sample=slope)


def _phase_growth(runs: Sequence[Run], phase: str) -> list[Growth]:
    """Chords between neighbouring micro-batches; one run alone is a constant."""
    points = sorted(
        (run.configuration.micro_batch, _growth_terms(run, found))
        for run in runs
        for found in run.phases
        if found.phase == phase
    )
    if len(points) == 1:
        return [Growth(phase=phase, fixed=points[0][1], per_sample={})]
    return [_chord(phase, low, high) for low, high in itertools.pairwise(points)]


def calibrate(
    runs: Iterable[Run],
    splits: Sequence[tuple[int, int]],
    *,
    flops_per_sample: float | None = None,
) -> TrackedModel:
    """The model behind these runs; variants that do not bracket all splits are left out.

    Raises:
        ValueError: no variant is complete.
    """
    variants: dict[str, list[Run]] = {}
    for run in runs:
        c = run.configuration
        key = growth_key(c.precision, c.checkpointing, accumulating=c.accumulation_steps > 1)
        variants.setdefault(key, []).append(run)
    growth = {
        key: tuple(part for phase in PHASES for part in _phase_growth(found, phase))
        for key, found in variants.items()
        if _brackets(found, splits)
    }
    growth = _with_pure_half(_both_kinds(growth, splits))
    if not growth:
        raise ValueError("no configuration was tracked at both ends of the micro-batch")
    first = next(iter(variants.values()))[0]
    return TrackedModel(
        parameters=first.parameters,
        trained=first.trained,
        buffer_bytes=first.buffer_bytes,
        largest=first.largest,
        growth=growth,
        block_parameters=first.block_parameters,
        root_parameters=first.root_parameters,
        flops_per_sample=flops_per_sample,
    )


def _brackets(runs: Sequence[Run], splits: Sequence[tuple[int, int]]) -> bool:
    """Whether the runs reach from the smallest to the largest micro-batch of their kind."""
    several = runs[0].configuration.accumulation_steps > 1
    wanted = [b for b, n in splits if (n > 1) == several]
    found = [run.configuration.micro_batch for run in runs]
    return not wanted or (min(found) <= min(wanted) and max(found) >= max(wanted))


def _both_kinds(
    growth: Mapping[str, tuple[Growth, ...]], splits: Sequence[tuple[int, int]]
) -> dict[str, tuple[Growth, ...]]:
    """Keep variants known for N = 1 and N > 1 where both occur; fill in the kind that does not."""
    kinds = {n > 1 for _, n in splits}
    result: dict[str, tuple[Growth, ...]] = {}
    for stem in dict.fromkeys(key.rpartition("|")[0] for key in growth):
        keys = {True: f"{stem}|N", False: f"{stem}|1"}
        known = {kind: growth[key] for kind, key in keys.items() if key in growth}
        if not all(kind in known for kind in kinds):
            continue
        for kind, key in keys.items():
            result[key] = known[kind] if kind in known else next(iter(known.values()))
    return result


def _with_pure_half(growth: dict[str, tuple[Growth, ...]]) -> dict[str, tuple[Growth, ...]]:
    """O3 keeps above its static bytes what O2 keeps."""
    twins = {f"O3{key[2:]}": value for key, value in growth.items() if key.startswith("O2")}
    return growth | twins
