"""Runs a script once per hook, that hook broken: forks after importing torch, so each run is cheap.

Arguments: SCRIPT KIND DIRECTORY HOOK...; the run of hook number i leaves its `stdout`, `stderr`
and `code` in DIRECTORY/i, which is also its runtime directory. The hook "none" breaks nothing.
"""

import atexit
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # what the first optimizer would import, once for all runs

from mpwatch_agent import agent, shield


class Broken(BaseException):
    """What a library that misuses BaseException might raise."""


def break_hook(name: str, kind: str, names: Path) -> None:
    """Make the guarded part of hook `name` raise; write every hook's name to `names`."""

    def fail(*args: Any) -> None:
        raise Broken("on purpose") if kind == "BaseException" else OSError("on purpose")

    def breaking(guard: Any) -> Any:
        def guard_broken(self: shield.Shield, hook: str, function: Any, *more: Any) -> Any:
            with names.open("a") as file:
                file.write(hook + "\n")
            return guard(self, hook, fail if hook == name else function, *more)

        return guard_broken

    for guard in ("guard", "guard_part"):
        setattr(shield.Shield, guard, breaking(getattr(shield.Shield, guard)))


def run(script: str, kind: str, directory: Path, hook: str) -> None:
    """In a forked child: the script under an agent whose hook `hook` is broken."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, number)
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    code = 0
    try:
        if hook != "unwatched":
            break_hook(hook, kind, directory / "names")
            agent.install_for_run(
                {
                    "run_id": "test",
                    "attempt": 1,
                    "run_directory": str(directory),
                    "runtime_directory": str(directory),
                    "pythonpath": os.environ.get("PYTHONPATH"),
                    "settings": {},
                }
            )
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / "code").write_text(str(code))
    os._exit(0)


def main() -> None:
    script, kind, directory, *hooks = sys.argv[1:]
    for index, hook in enumerate(hooks):
        child = os.fork()
        if child == 0:
            run(script, kind, Path(directory) / str(index), hook)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
