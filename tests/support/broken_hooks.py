"""Runs a script under an agent one of whose hooks is broken; a forge runs this.

Arguments: SCRIPT KIND DIRECTORY HOOK, where DIRECTORY is the runtime directory and gets a file
`names` of all hooks. The hook "none" breaks nothing, "unwatched" leaves the agent away.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from mpwatch_agent import agent, shield
from tests.support.agent_runs import specification


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


def main() -> None:
    script, kind, directory, hook = sys.argv[1:]
    sys.argv = [script]
    if hook != "unwatched":
        break_hook(hook, kind, Path(directory, "names"))
        agent.install_for_run(specification(Path(directory)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
