"""Summary of one run, running or ended: what happened, in numbers and in words.

Answers from the hub while the job runs and from the record afterwards; what neither has is told by
run.json and the keeper's entries.
"""

import argparse
import sys
from typing import Any

import msgspec

from mpwatch import client, runs
from mpwatch.cli.choice import add_run, chosen
from mpwatch.cli.formats import to_json
from mpwatch.cli.summary import summary
from mpwatch.errors import EXIT_OK, MpwatchError, UsageError
from mpwatch.glance import evidence_of
from mpwatch.run_state import Evidence
from mpwatch.runs import Run
from mpwatch.store import RunView
from mpwatch.vocabulary import State

# The documented keys that come straight from the view, in their documented order.
FROM_VIEW = (
    "steps",
    "applied",
    "skipped",
    "superseded",
    "script_window",
    "multiplier",
    "accumulation_steps",
    "windows_dropped",
    "loss_scale",
    "loss",
    "grad_norm",
    "samples_per_s",
    "phase_s",
    "memory_bytes",
    "precision",
    "scaling",
    "overflows",
    "diagnoses",
    "commands",
    "decisions",
    "checkpoints",
    "leak",
    "dropped_events",
    "agent_us_per_step",
    "agent_us_per_step_median",
    "locate_us",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch show`."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="the documented JSON object")
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="the newest distribution of gradients by layer, and what number formats lose of it",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="predicted against measured, for a run that was started with --config plan.toml",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the summary."""
    found = chosen(arguments)
    view = _view(found)
    evidence = runs.with_agent_files(found, None if view is None else evidence_of(view))
    # Read again: the job may have ended while its hub answered.
    found = runs.read_run(found.directory) or found
    state = runs.state_of(found, evidence)
    if arguments.plan:
        return _compare(found, as_json(found, state, evidence, view), view, arguments.json)
    if arguments.gradients:
        return _gradients(view, arguments.json)
    if arguments.json:
        print(to_json(as_json(found, state, evidence, view)))
    else:
        print(summary(found, state, evidence, view))
    return EXIT_OK


def _gradients(view: RunView | None, as_object: bool) -> int:
    """The newest distributions; as an object: the two events."""
    from mpwatch.cli.gradients_table import gradients_text

    view = view or RunView()
    if as_object:
        found = {"gradients": view.gradients, "activations": view.activations}
        print(to_json(msgspec.to_builtins(found)))
    else:
        print(gradients_text(view.gradients, view.activations))
    return EXIT_OK


def _compare(run: Run, known: dict[str, Any], view: RunView | None, as_object: bool) -> int:
    """Predicted against measured. Raises UsageError where the run has no plan."""
    from mpwatch.cli.plan_comparison import comparison, comparison_lines, whole_micro_batch

    plan = run.info.get("plan")
    if not (isinstance(plan, dict) and plan):
        raise UsageError(
            f"run {run.run_id} was started without a plan:"
            " mpwatch plan ... --emit plan.toml, then mpwatch run --config plan.toml ..."
        )
    micro_batch = None
    if view is not None:
        steps = view.applied + view.skipped
        micro_batch = whole_micro_batch(view.samples, steps * (view.accumulation_steps or 0))
    found = comparison(plan, known, micro_batch)
    print(to_json(msgspec.to_builtins(found)) if as_object else "\n".join(comparison_lines(found)))
    return EXIT_OK


def _view(run: Run) -> RunView | None:
    """The folded events; None, and a line on stderr, where nobody has any."""
    try:
        source = client.open_job(run.directory)
        try:
            return source.view()
        finally:
            source.close()
    except MpwatchError as error:
        print(f"mpwatch: {error}", file=sys.stderr)
        return None


def as_json(run: Run, state: State, evidence: Evidence, view: RunView | None) -> dict[str, Any]:
    """The object of `show --json`: its keys are documented and stable."""
    fields = msgspec.to_builtins(RunView() if view is None else view)
    known = {key: fields[key] for key in FROM_VIEW}
    if view is None:
        nothing_known = {"steps", "applied", "skipped", "superseded", "dropped_events"}
        known.update(dict.fromkeys(nothing_known))
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": state,
        "exit_code": run.exit_code,
        "attempts": runs.described_attempts(run, evidence),
        **known,
    }
