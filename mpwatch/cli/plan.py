"""Say which configuration fits a card, how fast it is and what it gives up.

Reads the question, has a module tracked in a child where one is given, prints the answer; what is
said comes from `mpwatch.planner`. Exit code 0: something fits, 1: nothing does, 2: unusable.
"""

import argparse
import sys
from collections.abc import Sequence

from msgspec import Struct, structs

from mpwatch.cli.plan_options import (
    add_arguments,
    described,
    read_device,
    read_limits,
    read_model,
    read_target,
)
from mpwatch.cli.plan_output import emit, inputs, survey_json
from mpwatch.cli.plan_plot import scatter, space_lines
from mpwatch.cli.plan_table import print_preset, print_survey
from mpwatch.cli.plan_tracking import Findings, Target, track
from mpwatch.cli.plan_verify import comparison, measure
from mpwatch.errors import EXIT_OK, EXIT_REFUSED, UsageError
from mpwatch.planner.calibration import RunConfiguration, calibrate, wanted_runs
from mpwatch.planner.candidates import allowed_precisions, splits
from mpwatch.planner.cards import Card
from mpwatch.planner.model import Model, TrackedModel
from mpwatch.planner.plans import Budget, Limits, Plan, as_tracked, disagreement
from mpwatch.planner.space import space
from mpwatch.planner.survey import Survey, survey
from mpwatch.planner.units import format_bytes

__all__ = ["add_arguments", "run"]

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


def _tracked_model(
    target: Target, card: Card, limits: Limits, notes: list[str]
) -> TrackedModel | None:
    """The module calibrated by tracked runs; None, with the cause noted, where that failed."""
    parts = splits(limits)
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


def _read_question(arguments: argparse.Namespace) -> Question:
    """The question. Raises UsageError where it cannot be answered at all."""
    card, budget = read_device(arguments)
    limits = read_limits(arguments)
    notes: list[str] = []
    if not arguments.model:
        model = read_model(arguments)
        return Question(
            card=card, budget=budget, limits=limits, model=model, target=None, notes=notes
        )
    target = read_target(arguments)
    tracked = _tracked_model(target, card, limits, notes)
    if tracked is None and not described(arguments):
        raise UsageError(
            f"{arguments.model}: {notes[-1]}; there is no estimate to fall back on:"
            " give --params or a transformer's shape as well"
        )
    if tracked is None:
        notes.append("falling back on the analytic estimate")
    return Question(
        card=card,
        budget=budget,
        limits=limits,
        model=tracked or read_model(arguments),
        target=target if tracked else None,
        notes=notes,
    )


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


def _verified(question: Question, answer: Survey) -> Survey:
    """Track the recommendation and the first plans of the front exactly; note disagreements."""
    first = [answer.recommended, *answer.front] if answer.recommended else [*answer.plans]
    chosen = list(dict.fromkeys(_key(plan) for plan in first if plan and _trackable(plan)))
    wanted = [plan for plan in answer.plans if _key(plan) in chosen[:VERIFIED_PLANS]]
    if question.target is None or not wanted:
        return answer
    findings = track(question.target, [_configuration(plan) for plan in wanted])
    peaks = {_run_key(run.configuration): run.peak_bytes for run in findings.runs}

    def checked(plan: Plan) -> Plan:
        peak = peaks.get(_run_key(_configuration(plan))) if _trackable(plan) else None
        return plan if peak is None else as_tracked(plan, question.budget, peak)

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
    question.notes.append(
        f"the first choice was tracked at {format_bytes(chosen.peak_bytes)} and does not fit"
    )
    best = min(others, key=lambda plan: plan.relative_time or 1.0, default=None)
    return structs.replace(answer, recommended=best)


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


def _print_answer(arguments: argparse.Namespace, question: Question, answer: Survey) -> None:
    """Everything that goes to stdout."""
    if arguments.json:
        asked = inputs(
            question.card.name, question.budget, question.model, question.limits, question.notes
        )
        print(survey_json(answer, asked))
        return
    print_survey(answer, question.budget, arguments.rows)
    if arguments.plot:
        print("\n".join(scatter(answer, question.budget)))
    if arguments.space:
        cells = space(question.model, question.card, question.budget, question.limits)
        print("\n".join(space_lines(cells)))
    if arguments.preset:
        print_preset(arguments.preset, question.budget, question.model, answer)


def _write_picture(path: str, question: Question, answer: Survey, *, of_space: bool) -> None:
    """The plot, or the space, into a file; matplotlib is imported only now."""
    from mpwatch.cli.plan_picture import picture_space, picture_survey

    if of_space:
        cells = space(question.model, question.card, question.budget, question.limits)
        picture_space(path, cells)
    else:
        picture_survey(path, answer, question.budget)


def run(arguments: argparse.Namespace) -> int:
    """Answer the question. Returns 0 when something fits, 1 when nothing does."""
    question = _read_question(arguments)
    answer = survey(question.model, question.card, question.budget, question.limits)
    answer = _verified(question, answer)
    for note in question.notes:
        print(f"mpwatch: {note}", file=sys.stderr)
    _print_answer(arguments, question, answer)
    if arguments.picture:
        _write_picture(arguments.picture, question, answer, of_space=arguments.space)
    if answer.recommended is None:
        return EXIT_REFUSED
    if arguments.emit:
        emit(arguments.emit, answer.recommended)
    if arguments.verify:
        summary = measure(arguments.verify, arguments.verify_steps)
        print("\n".join(comparison(answer.recommended, summary)))
    return EXIT_OK
