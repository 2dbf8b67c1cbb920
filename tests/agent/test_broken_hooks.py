"""Every hook raising in turn: the loop ends as it would have unwatched, and it is said once."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mpwatch.events import AgentExited, HookDisabled
from tests.support import agent_runs

SUPPORT = Path(__file__).resolve().parents[1] / "support"

# Hooks that this script passes through; the rest of the list is not reached by it.
REACHED = [
    "root search",
    "forward of a root",
    "backward",
    "end of backward",
    "Optimizer.__init__",
    "Optimizer.step",
    "end of Optimizer.step",
    "command at zero_grad",
    "Optimizer.zero_grad",
    "command at zero_grad of a module",
    "probes",
    "GradScaler.scale",
    "GradScaler.unscale_",
    "GradScaler.step",
    "end of GradScaler.step",
    "GradScaler.update",
    "clip_grad_norm_",
    "end of clip_grad_norm_",
    "clip_grad_value_",
    "DataLoader",
    "end of DataLoader",
]
NOT_REACHED = [
    "binding at a backward",
    "Module.zero_grad",
    "command in a watched loop",
    "torch.compile",
    "torch.jit.script",
    "torch.jit.trace",
]


def run_all(directory: Path, kind: str, hooks: list[str]) -> list[dict[str, Any]]:
    """What each run left, in the order of `hooks`."""
    with ExitStack() as stack:
        listeners = []
        for index in range(len(hooks)):
            (directory / str(index)).mkdir()
            listeners.append(stack.enter_context(agent_runs.listening(directory / str(index))))
        runner, script = str(SUPPORT / "broken_hooks.py"), str(SUPPORT / "small_loop.py")
        command = [sys.executable, runner, script, kind, str(directory), *hooks]
        subprocess.run(command, env=agent_runs.plain_environment(), check=True)
        for listener in listeners:
            listener.drain(0.05)
    return [
        {
            "code": (directory / str(index) / "code").read_text(),
            "stdout": (directory / str(index) / "stdout").read_text(),
            "stderr": (directory / str(index) / "stderr").read_text().splitlines(),
            "told": [event.hook for event in listener.of(HookDisabled)],
            "ended": len(listener.of(AgentExited)),
        }
        for index, listener in enumerate(listeners)
    ]


def test_the_list_of_hooks_is_complete(tmp_path: Path) -> None:
    run_all(tmp_path, "Exception", ["none"])
    names = (tmp_path / "0" / "names").read_text().splitlines()
    assert set(names) == {*REACHED, *NOT_REACHED}
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
def test_a_hook_that_raises_never_reaches_the_loop(tmp_path: Path, kind: str) -> None:
    plain, *broken = run_all(tmp_path, kind, ["unwatched", *REACHED])
    assert plain["code"] == "0"
    assert plain["stdout"].count("0x") + plain["stdout"].count("inf") == 24
    for hook, outcome in zip(REACHED, broken, strict=True):
        said = [line for line in outcome["stderr"] if line.startswith("mpwatch: ")]
        rest = [line for line in outcome["stderr"] if not line.startswith("mpwatch: ")]
        assert (outcome["code"], outcome["stdout"]) == ("0", plain["stdout"]), hook
        assert rest == plain["stderr"], hook
        assert len(said) == 1, hook
        assert hook in said[0]
        assert outcome["told"] == [hook]
        assert outcome["ended"] == 1, hook
