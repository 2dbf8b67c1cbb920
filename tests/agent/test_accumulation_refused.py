"""What cannot be accumulated exactly is refused by name, and nothing is lost by it."""

import json
from pathlib import Path

import torch

from mpwatch.events import AccumulationChanged, HookDisabled
from mpwatch_agent.open_window import OpenWindow
from mpwatch_agent.tracks import OptimizerTrack
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge, ForgedRun

SUPPORT = Path(__file__).resolve().parents[1] / "support"
# What a loop does, what is said about it, and whether its weights are those of a plain run.
STYLES = {
    "closure": ("closure", True),
    "in_backward": ("inside the backward", True),
    "compiled_step": ("compiled", True),
    "manual": ("no optimizer owns", True),
    "input_gradient": ("no optimizer owns", True),
    "gradient_edge": ("GradientEdge", True),
    "stepped_twice": ("without a backward", False),
    "late_closure": ("closure", False),
    "never_cleared": ("does not clear", False),
    "clipped_early": ("before the window is complete", True),
}


def end(run: ForgedRun, listener: Listener) -> list[str]:
    listener.follow(run)
    stdout, stderr = run.communicate()
    assert run.returncode == 0, stderr.decode()
    return stdout.decode().splitlines()


def test_each_is_refused_by_name(tmp_path: Path, forge: Forge) -> None:
    plain, watched = {}, {}
    for style in STYLES:
        for name, runs in (("plain", plain), ("watched", watched)):
            directory = tmp_path / f"{style}-{name}"
            directory.mkdir()
            spec = None if name == "plain" else specification(directory, accumulate=4)
            if name == "plain":
                runs[style] = forge.run(
                    SUPPORT / "refusing.py", directory, style, specification=spec
                )
    for style, (reason, same) in STYLES.items():
        directory = tmp_path / f"{style}-watched"
        with listening(directory) as listener:
            spec = specification(directory, accumulate=4)
            run = forge.run(SUPPORT / "refusing.py", directory, style, specification=spec)
            got = end(run, listener)
            wanted = end(plain[style], listener)
        started, refused = listener.of(AccumulationChanged)
        assert (started.multiplier, refused.multiplier, refused.refused) == (4, 1, True), style
        assert reason in refused.reason, (style, refused)
        assert not listener.of(HookDisabled), style
        if same:
            assert got == wanted, style
        else:
            assert got != wanted
        if style == "late_closure":
            # Two script windows are kept, the third brings the closure: their mean is applied.
            assert [step.multiplier for step in listener.steps()] == [3, 1]


def test_a_part_that_fails_gives_the_loop_back(tmp_path: Path, forge: Forge) -> None:
    """Every sample is in exactly one update with the weight of its group, or said to be lost."""
    script = SUPPORT / "failing_accumulation.py"
    run = forge.run(script, tmp_path, specification=None)
    with listening(tmp_path) as listener:
        failures = [json.loads(line) for line in end(run, listener)]
    assert len(failures) > 60
    failed = [failure for failure in failures if failure["said"]]
    assert len({failure["part"] for failure in failed}) > 20
    for failure in failures:
        seen: list[int] = []
        for group in failure["groups"]:
            # The mean over those that are in it.
            assert all(abs(by + 1 / len(group)) < 1e-6 for _, by in group), failure
            seen += [index for index, _ in group]
        missing = 16 - len(seen)
        assert seen == sorted(set(seen)), failure
        if missing:
            assert any("lost" in reason for reason in failure["said"]), failure
        if not failure["said"]:
            assert [len(group) for group in failure["groups"]] == [4] * 4, failure


def test_a_window_whose_count_is_off_is_not_applied() -> None:
    weight = torch.zeros(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    window = OpenWindow(OptimizerTrack(optimizer, 0))
    window.stash.add(optimizer)
    window.generations = [3, 5]
    assert window.flaw(3, 7) is None
    assert window.flaw(4, 7) == "3 script windows were gathered instead of 4"
    assert window.flaw(3, 5) == "a script window would be counted twice"
    (kept,) = window.stash.entries.values()
    kept.total.mul_(2)
    assert window.flaw(3, 7) == "the kept gradients were changed"
