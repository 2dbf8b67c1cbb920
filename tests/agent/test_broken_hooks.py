"""Every hook raising in turn: the loop ends as it would have unwatched, and it is said once."""

from pathlib import Path
from typing import Any

import pytest

from mpwatch.events import AgentExited, HookDisabled
from tests.support import agent_runs
from tests.support.forge import Forge

SUPPORT = Path(__file__).resolve().parents[1] / "support"

# Which hooks each script passes through. With one optimizer fewer hooks have something to do.
REACHED = {
    "small_loop.py": [
        "root search",
        "forward of a root",
        "backward",
        "LRScheduler.__init__",
        "Optimizer.__init__",
        "end of Optimizer.step",
        "Optimizer.zero_grad",
        "GradScaler.unscale_",
        "end of GradScaler.unscale_",
        "end of GradScaler.step",
        "GradScaler.update",
        "end of clip_grad_norm_",
        "DataLoader",
        "end of DataLoader",
        "a forward's arguments",
        # Parts of hooks, each gone alone.
        "losses",
        "micro-batch flags",
        "whole gradients",
        "norm of a clip",
        "end of a window",
        "a quiet step",
        "weights after a step",
        "overflow location",
        "diagnoses",
        "diagnoses of optimizers",
        "diagnoses of windows",
        "clips of a window",
        "distribution of gradients",
        "size of an update",
        "headroom of activations",
        "end of headroom",
    ],
    "bare_loop.py": [
        "backward",
        "end of backward",
        "Optimizer.__init__",
        "Optimizer.step",
        "end of Optimizer.step",
        "command at zero_grad",
        "Optimizer.zero_grad",
        "command at zero_grad of a module",
        "probes",
        "Module.zero_grad",
        "GradScaler.scale",
        "GradScaler.step",
        "end of GradScaler.step",
        "GradScaler.update",
    ],
}
NOT_REACHED = [
    "discarded windows",
    # Only where a loss is known late: tests.agent.test_late_forward.
    "forwards after an overflow",
    "binding at a backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "os.closerange",
    "failure of GradScaler.step",
    # Only where steps are noted: tests.agent.test_steady.
    "what a skip has found",
    "order of clip and unscale",
    "GradScaler.load_state_dict",
    "state of a module",
    "claim of the loop's thread",
    "command in a watched loop",
    "torch.compile",
    "torch.jit.script",
    "torch.jit.trace",
    "torch.export.export",
]


def run(forge: Forge, directory: Path, script: str, kind: str, hook: str) -> dict[str, Any]:
    """What a run with `hook` broken left."""
    directory.mkdir()
    with agent_runs.listening(directory) as listener:
        words = (str(SUPPORT / script), kind, str(directory), hook)
        process = forge.run(SUPPORT / "broken_hooks.py", directory, *words, specification=None)
        listener.follow(process)
    stdout, stderr = (text.decode() for text in process.communicate())
    return {
        "code": process.returncode,
        "stdout": stdout,
        "stderr": stderr.splitlines(),
        "told": [event.hook for event in listener.of(HookDisabled)],
        "ended": len(listener.of(AgentExited)),
    }


def test_the_list_of_hooks_is_complete(tmp_path: Path, forge: Forge) -> None:
    run(forge, tmp_path / "none", "small_loop.py", "Exception", "none")
    names = (tmp_path / "none" / "names").read_text().splitlines()
    reached = {hook for hooks in REACHED.values() for hook in hooks}
    # What steers a loop fails in its own way, and has its own tests.
    observing = {name for name in names if not name.startswith("steering ")}
    assert observing == {*reached, *NOT_REACHED}
    assert len(names) == len(set(names))


@pytest.mark.parametrize("script", REACHED)
@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
def test_a_hook_that_raises_never_reaches_the_loop(
    tmp_path: Path, forge: Forge, script: str, kind: str
) -> None:
    plain = run(forge, tmp_path / "unwatched", script, kind, "unwatched")
    assert plain["code"] == 0
    assert plain["stdout"].count("0x") + plain["stdout"].count("inf") == 24
    for number, hook in enumerate(REACHED[script]):
        outcome = run(forge, tmp_path / str(number), script, kind, hook)
        said = [line for line in outcome["stderr"] if line.startswith("mpwatch: hook ")]
        rest = [line for line in outcome["stderr"] if not line.startswith("mpwatch: ")]
        assert (outcome["code"], outcome["stdout"]) == (0, plain["stdout"]), hook
        assert rest == plain["stderr"], hook
        assert len(said) == 1, hook
        assert hook in said[0]
        assert outcome["told"] == [hook]
        assert outcome["ended"] == 1, hook
