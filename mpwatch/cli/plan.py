"""Say which configuration fits a card, how fast it is and what it gives up.

Reads the question, has a module tracked in a child where one is given, prints the answer; what is
said comes from `mpwatch.planner`. Exit code 0: something fits, 1: nothing does, 2: unusable.
"""

import argparse
import sys
from typing import Any

import msgspec

from mpwatch.cli.plan_checks import Question, shape_notes, tracked_model, verified
from mpwatch.cli.plan_comparison import Comparison, comparison, comparison_lines
from mpwatch.cli.plan_options import (
    add_arguments,
    described,
    read_device,
    read_json,
    read_limits,
    read_model,
    read_target,
)
from mpwatch.cli.plan_output import emit, emitted, inputs, survey_json
from mpwatch.cli.plan_plot import scatter, space_lines
from mpwatch.cli.plan_presets import preset_lines
from mpwatch.cli.plan_table import print_survey
from mpwatch.cli.plan_verify import check, measure
from mpwatch.errors import EXIT_OK, EXIT_REFUSED, UsageError
from mpwatch.planner.hf_config import notes_on
from mpwatch.planner.space import space
from mpwatch.planner.survey import Survey, survey

__all__ = ["add_arguments", "run"]


def _read_question(arguments: argparse.Namespace) -> Question:
    """The question. Raises UsageError where it cannot be answered at all."""
    card, budget = read_device(arguments)
    limits = read_limits(arguments)
    notes: list[str] = []
    if not arguments.model:
        model = read_model(arguments)
        if arguments.hf_config:
            notes += notes_on(read_json(arguments.hf_config))
        return Question(
            card=card, budget=budget, limits=limits, model=model, target=None, notes=notes
        )
    target = read_target(arguments)
    tracked = tracked_model(target, card, limits, notes)
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


def _print_answer(
    arguments: argparse.Namespace,
    question: Question,
    answer: Survey,
    measured: Comparison | None,
) -> None:
    """Everything that goes to stdout."""
    cells = preset = None
    if arguments.space:
        cells = space(question.model, question.card, question.budget, question.limits)
    if arguments.preset:
        preset = preset_lines(arguments.preset, question.budget, question.model, answer)
    if arguments.json:
        asked = inputs(
            question.card.name, question.budget, question.model, question.limits, question.notes
        )
        more: dict[str, Any] = {"space": cells, "preset": preset, "verified": measured}
        more = {name: msgspec.to_builtins(value) for name, value in more.items() if value}
        print(survey_json(answer, asked, **more))
        return
    print_survey(answer, question.budget, arguments.rows)
    if arguments.plot:
        print("\n".join(scatter(answer, question.budget)))
    if cells is not None:
        print("\n".join(space_lines(cells)))
    if preset is not None:
        print("\n".join(preset))
    if measured is not None:
        print("\n".join(comparison_lines(measured)))


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
    if arguments.verify is not None:
        check(arguments.verify, arguments.verify_steps)
    if arguments.plot and arguments.json:
        raise UsageError("--plot draws for people: leave out --json, or write --picture FILE")
    question = _read_question(arguments)
    answer = survey(question.model, question.card, question.budget, question.limits)
    answer = verified(question, answer)
    if question.target is not None and described(arguments):
        question.notes.extend(shape_notes(question, answer, read_model(arguments)))
    for note in question.notes:
        print(f"mpwatch: {note}", file=sys.stderr)
    chosen, measured = answer.recommended, None
    if arguments.verify and chosen is not None:
        summary, micro_batch = measure(arguments.verify, arguments.verify_steps)
        measured = comparison(emitted(chosen), summary, micro_batch)
    _print_answer(arguments, question, answer, measured)
    if arguments.picture:
        _write_picture(arguments.picture, question, answer, of_space=arguments.space)
    if chosen is None:
        return EXIT_REFUSED
    if arguments.emit:
        emit(arguments.emit, chosen)
    return EXIT_OK
