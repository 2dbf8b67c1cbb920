"""What `plan` writes for other programs: the JSON object and the TOML of `--emit`.

Both are documented in docs/planner.md and stable; fields are only added.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from mpwatch.errors import UsageError
from mpwatch.planner.model import Model, TrackedModel
from mpwatch.planner.plans import Budget, Limits, Plan
from mpwatch.planner.survey import Survey

EMITTED = (
    "precision",
    "accumulation_steps",
    "micro_batch",
    "checkpointing",
    "attention",
    "optimizer",
    "sharding",
    "devices",
    "batch",
    "family",
    "peak_bytes",
)


def inputs(
    card_name: str, budget: Budget, model: Model, limits: Limits, notes: list[str]
) -> dict[str, Any]:
    """The question as it was understood."""
    described: dict[str, Any] = msgspec.to_builtins(model)
    if isinstance(model, TrackedModel):
        described.pop("growth")
    return {
        "card": card_name,
        "memory_bytes": budget.memory_bytes,
        "context_bytes": budget.context_bytes,
        "usable_peak_bytes": round(max(0.0, budget.largest_peak)),
        "model": described,
        "limits": msgspec.to_builtins(limits),
        "notes": notes,
    }


def survey_json(survey: Survey, question: dict[str, Any], **more: Any) -> str:
    """The documented object: `inputs`, `recommended`, `plans` (front first), and the reasons;
    `more` holds what was asked for beside (`verified`, `space`, `preset`)."""
    return json.dumps(
        {
            "inputs": question,
            "recommended": msgspec.to_builtins(survey.recommended),
            "plans": msgspec.to_builtins(survey.plans),
            "front": len(survey.front),
            "reason": survey.reason,
            "ladder": [rung.words() for rung in survey.rungs],
            "candidates": survey.candidates,
            "samples_factor": survey.samples_factor,
            "soonest_accumulation": survey.soonest_accumulation,
            **more,
        },
        indent=2,
        allow_nan=False,
    )


def emitted(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that a run keeps, as they stand in the file."""
    fields = msgspec.to_builtins(plan)
    kept = {name: fields[name] for name in EMITTED}
    kept |= {"label": plan.labels["peak_bytes"], "phase_bytes": plan.phase_bytes}
    if plan.time_per_sample_s is not None:
        kept["time_per_sample_s"] = plan.time_per_sample_s
    return kept


def _toml(value: Any) -> str:
    """A value of `emitted` in TOML: strings and numbers look as in JSON, a table is inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


def emit(path: str, plan: Plan) -> None:
    """Write the recommendation for `mpwatch run --config`. Raises UsageError."""
    lines = ["# Written by `mpwatch plan`; read by `mpwatch run --config`.", "[plan]"]
    lines += [f"{name} = {_toml(value)}" for name, value in emitted(plan).items()]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
