"""Runs a script under an agent a part of whose steering is broken; a forge runs this.

Arguments: WORDS SETTINGS DIRECTORY CASE; WORDS are the script and its arguments, DIRECTORY is the
runtime directory. A case is NAME#N: the guarded function NAME raises on its Nth call, or
"unscale#N" and "unscale#always" for the kernel below them; "unwatched" leaves the agent away.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from mpwatch_agent import agent, in_flight, shield
from tests.support.agent_runs import specification


def failing(function: Any, calls: str) -> Any:
    """`function`, raising on the call numbered `calls`, or on each."""
    count = 0

    def fails(*args: Any) -> Any:
        nonlocal count
        count += 1
        if calls == "always" or count == int(calls):
            raise OSError("on purpose")
        return function(*args)

    return fails


def break_part(case: str, names: Path) -> None:
    """Make what `case` names raise; write the names of all guarded functions to `names`."""
    name, calls = case.split("#")
    if name == "unscale":
        in_flight.unscale = failing(in_flight.unscale, calls)
    guard = shield.Shield.guard_steering

    def guard_broken(self: Any, hook: str, function: Any, abandon: Any) -> Any:
        with names.open("a") as file:
            file.write(hook + "\n")
        return guard(self, hook, failing(function, calls) if hook == name else function, abandon)

    shield.Shield.guard_steering = guard_broken  # type: ignore[method-assign]


def main() -> None:
    words, settings, directory, case = sys.argv[1:]
    sys.argv = words.split()
    if case != "unwatched":
        break_part(case, Path(directory, "names"))
        agent.install_for_run(specification(Path(directory), **json.loads(settings)))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
