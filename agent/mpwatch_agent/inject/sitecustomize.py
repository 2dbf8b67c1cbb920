"""Found first on PYTHONPATH by a supervised interpreter; starts the agent, then steps aside.

Must not import torch, must not fail, and must leave the next `sitecustomize` on the path its turn.
"""

import os
import sys


def _next_sitecustomize(folder: str) -> None:
    """Run the `sitecustomize` that the interpreter would have found without us."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        # The interpreter is still importing the name: replace the entry, never remove it.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _begin() -> None:
    specification = os.environ.get("_MPWATCH_AGENT")
    if not specification or os.environ.get("MPWATCH_DISABLED", "0") not in ("", "0"):
        return
    try:
        from mpwatch_agent.entry import begin

        begin(specification)
    except Exception as error:
        # The interpreter of the script may not have mpwatch installed, or an older one.
        _say_unwatched(specification, f"{type(error).__name__}: {error}")


def _say_unwatched(specification: str, reason: str) -> None:
    """On stderr, and in the run directory for `show`, as `mpwatch_agent.entry` does it."""
    import json

    try:
        os.write(2, f"mpwatch: runs unwatched: {reason}\n".encode(errors="replace"))
        path = os.path.join(json.loads(specification)["run_directory"], "unwatched.txt")
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(f"{reason}\n")
    except Exception:
        return  # there already, or no place for it: stderr has it


_begin()
_next_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
