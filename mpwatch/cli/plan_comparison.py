"""Predicted against measured: a plan's fields beside what a run's summary says, per phase.

The summary is the documented JSON of `show`, the plan the table of `--emit`, which a person may
have edited: whatever is no number counts as unknown. Pure; used by `plan --verify` and
`show --plan`.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mpwatch.planner.units import format_bytes, format_seconds
from mpwatch.vocabulary import clean_text

PHASES = ("forward", "backward", "optimizer")
WHOLE_PROCESS = ("resident", "rss")
"""Kinds of reading that hold more than tensors."""
OTHER_BATCH = "the script's micro-batch is another"
NOT_TENSORS = "interpreter and libraries included"
UNSEEN = ("precision", "optimizer", "checkpointing", "attention", "sharding")
"""What a plan asks for and no summary tells: the script's own stays unknown."""


class Field(Struct, frozen=True, kw_only=True):
    """One thing that the plan decided, beside the script's own."""

    name: str
    planned: Any
    ran: int | None
    """None is unknown"""
    note: str


class Phase(Struct, frozen=True, kw_only=True):
    """One phase; None is unknown."""

    phase: str
    predicted_bytes: int | None
    predicted_label: str
    measured_bytes: float | None
    measured_kind: str | None
    difference: float | None
    """(predicted - measured) / measured; None where the two are not of the same thing"""
    no_difference_because: str | None
    measured_s: float | None
    """median seconds"""


class Comparison(Struct, frozen=True, kw_only=True):
    """All of it: the documented object of `show --plan --json`."""

    run_id: str
    plan: dict[str, Any]
    fields: tuple[Field, ...]
    unseen: tuple[str, ...]
    """fields of the plan that a run does not tell"""
    phases: tuple[Phase, ...]
    predicted_time_per_sample_s: float | None
    """on the planned device"""
    measured_time_per_sample_s: float | None
    """where the run was"""


def _number(value: object) -> float | None:
    """A positive finite number, or None."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and 0 < value < 1e300 else None  # type: ignore[operator,arg-type]


def _whole(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _inside(table: object, key: str) -> Any:
    """A key of what may be no table at all."""
    return table.get(key) if isinstance(table, Mapping) else None


def _accumulation(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> Field:
    """N against the script's window n: K = N / n where that is whole."""
    planned, window = _whole(plan.get("accumulation_steps")), _whole(summary.get("script_window"))
    ran = _whole(summary.get("accumulation_steps"))
    if ran is None or planned is None:
        note = "unknown"
    elif ran == planned:
        note = "as planned"
    elif window and planned % window == 0:
        note = f"not met: it would take K = {planned // window} times the script's {window}"
    else:
        note = f"not met: no multiple of the script's {window or ran}"
    return Field(
        name="accumulation_steps", planned=plan.get("accumulation_steps"), ran=ran, note=note
    )


def _micro_batch(plan: Mapping[str, Any], ran: int | None) -> Field:
    planned = _whole(plan.get("micro_batch"))
    known = ran is not None and planned is not None
    note = "unknown" if not known else "as planned" if ran == planned else OTHER_BATCH
    return Field(name="micro_batch", planned=plan.get("micro_batch"), ran=ran, note=note)


def _phase(
    plan: Mapping[str, Any], summary: Mapping[str, Any], phase: str, *, other_batch: bool
) -> Phase:
    predicted = _whole(_inside(plan.get("phase_bytes"), phase))
    reading = _inside(summary.get("memory_bytes"), phase)
    measured, kind = _number(_inside(reading, "peak")), _inside(reading, "kind")
    because = None
    if measured is not None and predicted is not None:
        because = NOT_TENSORS if kind in WHOLE_PROCESS else OTHER_BATCH if other_batch else None
    comparable = measured is not None and predicted is not None and because is None
    return Phase(
        phase=phase,
        predicted_bytes=predicted,
        predicted_label=str(plan.get("label", "unknown")) if predicted else "unknown",
        measured_bytes=measured,
        measured_kind=str(kind) if measured is not None else None,
        difference=(predicted - measured) / measured if comparable else None,  # type: ignore[operator]
        no_difference_because=because,
        measured_s=_number(_inside(_inside(summary.get("phase_s"), phase), "median")),
    )


def whole_micro_batch(samples: int | None, micro_batches: int | None) -> int | None:
    """Samples of one micro-batch where all have equally many; None where that is not known."""
    if not samples or not micro_batches or samples % micro_batches:
        return None
    return samples // micro_batches


def comparison(
    plan: Mapping[str, Any], summary: Mapping[str, Any], micro_batch: int | None = None
) -> Comparison:
    """Set a plan against a run; `micro_batch` is the script's, where it is known."""
    fields = (_accumulation(plan, summary), _micro_batch(plan, micro_batch))
    other = fields[1].note == OTHER_BATCH
    rate = _number(summary.get("samples_per_s"))
    return Comparison(
        run_id=str(summary.get("run_id", "unknown")),
        plan=dict(plan),
        fields=fields,
        unseen=tuple(name for name in UNSEEN if name in plan),
        phases=tuple(_phase(plan, summary, phase, other_batch=other) for phase in PHASES),
        predicted_time_per_sample_s=_number(plan.get("time_per_sample_s")),
        measured_time_per_sample_s=1 / rate if rate is not None else None,
    )


def _phase_line(row: Phase) -> str:
    text = f"{row.phase:9} predicted "
    known = row.predicted_bytes is not None
    size = f"{format_bytes(row.predicted_bytes or 0)} ({row.predicted_label})"
    text += size if known else "unknown"
    if row.measured_bytes is None:
        text += ", measured unknown"
    else:
        text += f", measured {format_bytes(row.measured_bytes)} [{row.measured_kind}]"
    if row.difference is not None:
        text += f" ({row.difference:+.1%})"
    if row.no_difference_because is not None:
        text += f" (no difference is taken: {row.no_difference_because})"
    return text + (
        f", {format_seconds(row.measured_s)} measured" if row.measured_s else ", time unknown"
    )


def comparison_lines(found: Comparison) -> list[str]:
    """The same for people, one fact a line; what is unknown says so."""
    lines = [f"run {found.run_id}: predicted against measured"]
    for field in found.fields:
        ran = "unknown" if field.ran is None else field.ran
        planned = "unknown" if field.planned is None else clean_text(str(field.planned), 40)
        note = "" if field.note == "unknown" else f": {field.note}"
        lines.append(f"{field.name} planned {planned}, the script's {ran}{note}")
    if found.unseen:
        asked = ", ".join(
            f"{name} {clean_text(str(found.plan[name]), 40)}" for name in found.unseen
        )
        lines.append(f"planned and not seen in a run: {asked}")
    lines += [clean_text(_phase_line(row), 300) for row in found.phases]
    predicted, measured = found.predicted_time_per_sample_s, found.measured_time_per_sample_s
    lines.append(
        "per sample predicted "
        + (
            f"{format_seconds(predicted)} (estimated, for the planned device)"
            if predicted
            else "unknown"
        )
        + (f", measured {format_seconds(measured)} here" if measured else ", measured unknown")
    )
    return lines
