"""Temporary dispatcher of the `plan` verb."""

import argparse
import sys

from mpwatch.cli import plan
from mpwatch.errors import MpwatchError


def main() -> int:
    """Run `plan`; one line on stderr for errors meant for people."""
    parser = argparse.ArgumentParser(prog="mpwatch")
    verbs = parser.add_subparsers(dest="verb", required=True)
    plan.add_arguments(verbs.add_parser("plan", help=(plan.__doc__ or "").splitlines()[0]))
    arguments = parser.parse_args()
    try:
        return plan.run(arguments)
    except MpwatchError as error:
        print(f"mpwatch: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
