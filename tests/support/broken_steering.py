"""Runs a script once per broken part of the steering: forks after importing torch.

Arguments: SCRIPT SETTINGS DIRECTORY CASE... A case is NAME#N: the guarded function NAME raises on
its Nth call, or "unscale#N" and "unscale#always" for the kernel below them. Each run leaves its
`stdout`, `stderr` and `code` in DIRECTORY/i, which is also its runtime directory.
"""

import atexit
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from mpwatch_agent import agent, in_flight, shield

torch.set_num_threads(1)


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


def run(script: str, settings: dict[str, Any], directory: Path, case: str) -> None:
    """In a forked child: the script under an agent in which `case` is broken."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, number)
    script, *sys.argv[1:] = script.split()
    sys.argv[0] = script
    code = 0
    try:
        if case != "unwatched":
            break_part(case, directory / "names")
            agent.install_for_run(
                {
                    "run_id": "test",
                    "attempt": 1,
                    "run_directory": str(directory),
                    "runtime_directory": str(directory),
                    "pythonpath": os.environ.get("PYTHONPATH"),
                    "settings": settings,
                }
            )
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / "code").write_text(str(code))
    os._exit(0)


def main() -> None:
    script, settings, directory, *cases = sys.argv[1:]
    for index, case in enumerate(cases):
        if os.fork() == 0:
            run(script, json.loads(settings), Path(directory) / str(index), case)
        os.wait()


if __name__ == "__main__":
    main()
