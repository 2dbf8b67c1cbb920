"""Print the resolved configuration of a run, each value with its origin."""

import argparse
import os
import sys

from mpwatch.cli import options
from mpwatch.cli.configuration import resolve, unknown_variables
from mpwatch.cli.formats import table, to_json
from mpwatch.errors import EXIT_OK
from mpwatch.vocabulary import STDERR_PREFIX, clean_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `mpwatch config`: the options of `run`, to try them out."""
    options.add_to(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML with options or a plan")
    parser.add_argument("--json", action="store_true", help="{name: {value, origin}}")


def run(arguments: argparse.Namespace) -> int:
    """Print names, values and origins."""
    configuration = resolve(vars(arguments), os.environ, ".", arguments.config)
    if (unknown := unknown_variables(os.environ)) is not None:
        print(f"{STDERR_PREFIX}{unknown}", file=sys.stderr)
    settings = configuration.settings
    if arguments.json:
        print(to_json({name: setting._asdict() for name, setting in settings.items()}))
        return EXIT_OK
    rows = [["OPTION", "VALUE", "ORIGIN"]]
    for name, (value, origin) in settings.items():
        rows.append([name, clean_text(_shown(value), 200), clean_text(origin, 200)])
    for name, value in configuration.plan.items():
        applied = name == "precision" and settings[name].origin.endswith("[plan]")
        done = "applied as precision" if applied else "not applied"
        origin = f"{configuration.plan_file} [plan], {done}"
        rows.append([f"plan.{name}", clean_text(str(value), 200), clean_text(origin, 200)])
    print(table(rows))
    return EXIT_OK


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list | tuple) else str(value)
