"""Who imports whom, proven at run time as well as by lint."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AGENT_MAY_IMPORT = {
    "__init__",
    "__main__",
    "codec",
    "commands",
    "errors",
    "event_base",
    "events",
    "numeric_events",
    "faults",
    "rendezvous",
    "vocabulary",
    "wire",
}


def modules_after(*statements: str) -> set[str]:
    """The modules in a child's `sys.modules` after `statements`."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules)"])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}:{ROOT / 'tui'}", "PATH": "/usr/bin:/bin"},
    )
    return set(done.stdout.split())


def test_every_module_is_on_the_agents_list() -> None:
    """A new module of the core is either allowed to the agent here or forbidden by lint."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = config["tool"]["importlinter"]["contracts"][0]
    forbidden = {
        name.removeprefix("mpwatch.")
        for name in contract["forbidden_modules"]
        if name.startswith("mpwatch.")
    }
    there = {path.stem for path in (ROOT / "mpwatch").glob("*.py")} | {
        path.parent.name for path in (ROOT / "mpwatch").glob("*/__init__.py")
    }
    assert there - AGENT_MAY_IMPORT == forbidden
    assert not AGENT_MAY_IMPORT & forbidden


def test_the_agent_brings_nothing_of_an_observer() -> None:
    loaded = modules_after("from mpwatch_agent import watch", "import mpwatch_agent.agent")
    assert "mpwatch_agent.agent" in loaded
    observers = {"textual", "rich", "psutil", "pynvml", "sqlite3", "mpwatch_tui"}
    ours = {name.removeprefix("mpwatch.") for name in loaded if name.startswith("mpwatch.")}
    # What torch and pyzmq bring by themselves is theirs.
    brought = loaded - modules_after("import torch, torch.utils.data", "import zmq, msgspec")
    assert not observers & brought
    assert ours <= AGENT_MAY_IMPORT


def test_importing_the_package_of_the_agent_is_nearly_free() -> None:
    loaded = modules_after("import mpwatch_agent", "import mpwatch_agent.entry")
    assert not {"torch", "zmq", "msgspec", "asyncio", "numpy"} & loaded


def test_listing_runs_loads_nothing_slow() -> None:
    loaded = modules_after(
        "from mpwatch.cli.main import main",
        "assert main(['ls', '--runs-dir', '/nonexistent']) in (0, 2)",
    )
    assert (
        not {"asyncio", "numpy", "textual", "rich", "torch", "pynvml", "importlib.metadata"}
        & loaded
    )
