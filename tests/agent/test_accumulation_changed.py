"""K changed a thousand times while the loop runs: each change at a boundary, nothing lost."""

import json
from pathlib import Path

import pytest

from mpwatch.events import (
    AccumulationChanged,
    AgentExited,
    CommandApplied,
    CommandRefused,
    HookDisabled,
)
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "changing.py"
SIZES = {"module": (2000, 1000), "bare": (400, 150)}


@pytest.mark.parametrize("kind", SIZES)
def test_a_thousand_changes_at_random_moments(tmp_path: Path, forge: Forge, kind: str) -> None:
    samples, changes = SIZES[kind]
    spec = specification(tmp_path, lr_rule="sqrt", locate="off")
    arguments = (str(samples), str(changes), kind)
    with listening(tmp_path) as listener:
        run = forge.run(SCRIPT, tmp_path, *arguments, specification=spec)
        listener.follow(run)
    stdout, stderr = run.communicate()
    assert run.returncode == 0, stderr.decode()
    updates = [json.loads(line) for line in stdout.decode().splitlines()]
    steps = listener.steps()
    applied = [step for step in steps if step.applied]
    moving = [update for update in updates if update["moved"]]
    assert len(moving) == len(applied) > samples // 10

    # Each sample moved its weight once, by the rule over K, together with the rest of its window.
    end, number = 0, iter(moving)
    for step in steps:
        begin, end = end, end + step.multiplier
        assert step.micro_batches == step.multiplier
        if step.applied:
            update = next(number)
            assert update["moved"] == list(range(begin, end))
            # The rule is relative to the script's own batch, however often K has changed.
            rate = step.multiplier**0.5
            assert step.learning_rates == (rate,)
            assert all(abs(by * step.multiplier + rate) < 1e-6 for by in update["by"])
    exited = listener.of(AgentExited)[0]
    assert end + exited.windows_dropped == samples
    # The scale is one number in each window, and moves between windows only.
    assert all(len(set(update["scales"])) == 1 for update in updates if not update["moved"])
    assert len({step.loss_scale_before for step in steps}) > 2

    # Each request has its outcome, good ones at the step where K became what they asked for.
    outcomes = {e.id: e for e in [*listener.of(CommandApplied), *listener.of(CommandRefused)]}
    assert len(outcomes) == changes
    refused = [e for e in outcomes.values() if isinstance(e, CommandRefused)]
    assert changes // 100 < len(refused) < changes // 8
    changed = listener.of(AccumulationChanged)
    assert len(changed) > changes // 4
    by_step = {event.step: event.multiplier for event in changed}
    k = 1
    for step in steps:
        k = by_step.get(step.step - 1, k)
        assert step.multiplier == k
    assert not listener.of(HookDisabled)
