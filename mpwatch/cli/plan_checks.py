"""Where `plan` meets a real module: calibration by tracked runs, and checks of single plans.

The question and the answer pass through here; what is worth a line on stderr lands in the
question's notes. The child itself is started in plan_tracking.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from mpwatch.cli.plan_tracking import Findings, Target, track
from mpwatch.planner.activations import ATTENTIONS
from mpwatch.planner.calibration import RunConfiguration, calibrate, wanted_runs
from mpwatch.planner.candidates import allowed_precisions, splits
from mpwatch.planner.cards import Card
from mpwatch.planner.footprint import Setup, peak_moment
from mpwatch.planner.model import Model, TrackedModel, TransformerShape
from mpwatch.planner.moments import moments
from mpwatch.planner.numerics import find_optimizer, find_precision
from mpwatch.planner.plans import Budget, Limits, Plan, as_tracked, disagreement
from mpwatch.planner.survey import Survey
from mpwatch.planner.units import format_apart, format_bytes

VERIFIED_PLANS = 4
DISAGREEMENT = 0.10


class Question(Struct, frozen=True, kw_only=True):
    """Everything that was asked, and what is worth saying about how it was understood."""

    card: Card
    budget: Budget
    limits: Limits
    model: Model
    target: Target | None
    notes: list[str]


def tracked_model(
    target: Target, card: Card, limits: Limits, notes: list[str]
) -> TrackedModel | None:
    """The module calibrated by tracked runs; None, with the cause noted, where that failed."""
    parts = splits(limits)
    if limits.devices > 1:  # gradients stay through forward whatever N is
        parts = [(micro_batch, max(2, n)) for micro_batch, n in parts]
    precisions = [numerics.name for numerics in allowed_precisions(card, limits)]
    findings: Findings = track(target, wanted_runs(precisions, parts))
    if findings.real:
        notes.append(
            "tracked on real tensors full of zeros, since the module reads values of tensors"
        )
    notes += [f"not tracked: {cause}" for cause in dict.fromkeys(findings.failures)]
    if findings.cause is not None:
        notes.append(f"tracking stopped: {findings.cause}")
    try:
        return calibrate(findings.runs, parts, flops_per_sample=findings.flops_per_sample)
    except ValueError as error:
        if findings.cause is None:
            notes.append(f"tracking was of no use: {error}")
        return None


def _configuration(plan: Plan) -> RunConfiguration:
    return RunConfiguration(
        precision=plan.precision,
        micro_batch=plan.micro_batch,
        accumulation_steps=plan.accumulation_steps,
        checkpointing=plan.checkpointing,
        optimizer=plan.optimizer,
    )


def _trackable(plan: Plan) -> bool:
    """Quantised states and sharding have no counterpart in a single process on CPU."""
    return plan.optimizer != "adamw-8bit" and plan.sharding == "none"


def verified(question: Question, answer: Survey) -> Survey:
    """Track the recommendation and the first plans of the front exactly; note disagreements."""
    first = [answer.recommended, *answer.front] if answer.recommended else [*answer.plans]
    chosen = list(dict.fromkeys(_key(plan) for plan in first if plan and _trackable(plan)))
    wanted = [plan for plan in answer.plans if _key(plan) in chosen[:VERIFIED_PLANS]]
    if question.target is None or not wanted:
        return answer
    findings = track(question.target, [_configuration(plan) for plan in wanted])
    runs = {_run_key(run.configuration): run for run in findings.runs}

    def checked(plan: Plan) -> Plan:
        run = runs.get(_run_key(_configuration(plan))) if _trackable(plan) else None
        if run is None:
            return plan
        phases = {phase.phase: phase.peak_bytes for phase in run.phases}
        return as_tracked(plan, question.budget, run.peak_bytes, phases)

    answer = structs.replace(
        answer,
        plans=tuple(map(checked, answer.plans)),
        front=tuple(map(checked, answer.front)),
        recommended=checked(answer.recommended) if answer.recommended else None,
    )
    question.notes.extend(_disagreements(answer.plans))
    return _settled(question, answer)


def _settled(question: Question, answer: Survey) -> Survey:
    """Another recommendation where tracking showed that the first one does not fit after all."""
    chosen = answer.recommended
    if chosen is None or chosen.fits:
        return answer
    others = [plan for plan in answer.plans if plan.fits and plan.family == chosen.family]
    peak, usable = format_apart(chosen.peak_bytes, max(0.0, question.budget.largest_peak))
    first = f"the first choice was tracked at {peak}, over the {usable} that are usable"
    question.notes.append(first)
    best = min(others, key=lambda plan: plan.relative_time or 1.0, default=None)
    then = (
        f"of the {len(others)} others of family {chosen.family} listed that fit this one is the"
        " fastest"
        if others
        else f"none of the others of family {chosen.family} listed fits"
    )
    return structs.replace(answer, recommended=best, reason=f"{first}; {then}")


def shape_notes(question: Question, answer: Survey, shape: Model) -> list[str]:
    """Tracked against the analytic estimate, where a module and a shape were both given and the
    nearer of the two kinds of attention is over 10 % away."""
    chosen = answer.recommended
    if question.target is None or chosen is None or not isinstance(shape, TransformerShape):
        return []
    peaks = {}
    for attention in ATTENTIONS:
        setup = Setup(
            model=shape,
            numerics=find_precision(chosen.precision),
            optimizer=find_optimizer(chosen.optimizer),
            attention=attention,
            checkpointing=chosen.checkpointing,
            cuda=question.limits.cuda,
        )
        steps = moments(setup, accumulating=chosen.accumulation_steps > 1)
        moment = peak_moment(steps, chosen.micro_batch)
        peaks[attention] = moment.bytes_at(chosen.micro_batch)
    nearest = min(abs(peak - chosen.peak_bytes) for peak in peaks.values())
    if nearest <= DISAGREEMENT * chosen.peak_bytes:
        return []
    estimates = ", ".join(f"{format_bytes(peak)} ({name})" for name, peak in peaks.items())
    return [f"tracked {format_bytes(chosen.peak_bytes)}, estimated from the shape {estimates}"]


def _key(plan: Plan) -> tuple[object, ...]:
    return (*_run_key(_configuration(plan)), plan.sharding, plan.family)


def _run_key(configuration: RunConfiguration) -> tuple[object, ...]:
    return structs.astuple(configuration)


def _disagreements(plans: Sequence[Plan]) -> list[str]:
    """One line for each plan whose tracked peak is over 10 % away from the estimate."""
    return [
        f"{plan.precision} b={plan.micro_batch} N={plan.accumulation_steps}: tracked"
        f" {format_bytes(plan.peak_bytes)}, estimated {format_bytes(plan.estimated_peak_bytes)}"
        for plan in plans
        if plan.estimated_peak_bytes is not None and (disagreement(plan) or 0) > DISAGREEMENT
    ]
