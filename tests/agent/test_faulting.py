"""Injected faults land where they were aimed: told by the script's own prints."""

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mpwatch import rendezvous
from mpwatch.events import AgentExited, FaultInjected
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "windowed_loop.py"


def run(
    forge: Forge, directory: Path, steps: int, *inject: str
) -> tuple[Listener, int, list[list[str]]]:
    """(events, exit code, the words of each line the script printed)"""
    with listening(directory) as listener:
        spec = specification(directory, inject=list(inject))
        process = forge.run(SCRIPT, directory, str(steps), specification=spec)
        listener.follow(process)
    stdout, _ = process.communicate()
    assert process.returncode is not None
    return listener, process.returncode, [line.split() for line in stdout.decode().splitlines()]


def told(listener: Listener) -> list[tuple[Any, ...]]:
    return [(e.fault, e.step, e.micro_batch, e.target) for e in listener.of(FaultInjected)]


def test_overflow_in_the_last_micro_batch_skips_one_step(tmp_path: Path, forge: Forge) -> None:
    listener, code, lines = run(forge, tmp_path, 5, "overflow@step=3")
    assert code == 0
    assert [words[1] for words in lines] == ["True", "True", "False", "True", "True"]
    assert [float(words[2]) for words in lines] == [1024, 1024, 512, 512, 512]
    assert told(listener) == [("overflow", 3, 2, "2.bias")]
    steps = listener.steps()
    assert [step.applied for step in steps] == [True, True, False, True, True]
    assert [step.overflow for step in steps] == [False, False, True, False, False]
    assert [step.loss_scale_after for step in steps] == [1024, 1024, 512, 512, 512]
    # The losses are what the script passed: each divided by three.
    passed = [[float(word) for word in words[3:]] for words in lines]
    assert [list(step.losses) for step in steps] == passed
    for step, losses in zip(steps, passed, strict=True):
        assert step.loss_divisor == 3
        assert step.loss == pytest.approx(sum(losses))


def test_overflow_in_a_named_place_and_a_range_of_steps(tmp_path: Path, forge: Forge) -> None:
    listener, _, lines = run(forge, tmp_path, 4, "overflow@step=2..3,micro=1,param=0.weight")
    assert [words[1] for words in lines] == ["True", "False", "False", "True"]
    assert told(listener) == [("overflow", 2, 1, "0.weight"), ("overflow", 3, 1, "0.weight")]


def test_nan_comes_out_of_the_named_module_once(tmp_path: Path, forge: Forge) -> None:
    listener, _, lines = run(forge, tmp_path, 4, "nan@step=3,micro=0,module=1")
    finite = [[math.isfinite(float(word)) for word in words[3:]] for words in lines]
    assert finite == [[True] * 3, [True] * 3, [False, True, True], [True] * 3]
    assert [words[1] for words in lines] == ["True", "True", "False", "True"]
    assert told(listener) == [("nan", 3, 0, "1")]
    losses = listener.steps()[2].losses
    assert losses[0] is not None
    assert math.isnan(losses[0])


def test_a_fault_for_another_rank_does_nothing(tmp_path: Path, forge: Forge) -> None:
    listener, _, lines = run(forge, tmp_path, 3, "overflow@step=2,rank=1")
    assert [words[1] for words in lines] == ["True"] * 3
    assert told(listener) == []


def test_slow_takes_its_second_in_the_named_phase(tmp_path: Path, forge: Forge) -> None:
    listener, _, _ = run(forge, tmp_path, 3, "slow@step=2,phase=optimizer")
    optimizer = [step.phase_s["optimizer"] for step in listener.steps()]
    assert optimizer[1] > 1.0
    assert max(optimizer[0], optimizer[2]) < 1.0
    # A fault is no work of the agent's.
    assert listener.steps()[1].agent_s < 0.5


def test_kill_fires_once_even_across_restarts(tmp_path: Path, forge: Forge) -> None:
    _, code, lines = run(forge, tmp_path, 3, "kill@step=2")
    assert (code, len(lines)) == (-9, 1)
    for left in ("rank-1-0",):
        (tmp_path / left).unlink()
    _, code, lines = run(forge, tmp_path, 3, "kill@step=2")
    assert (code, len(lines)) == (0, 3)


def test_the_hub_is_killed_or_stopped_by_its_endpoint_file(tmp_path: Path, forge: Forge) -> None:
    hub = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    rendezvous.write_json(
        tmp_path / rendezvous.ENDPOINT_FILE,
        {"pid": hub, "start_time": rendezvous.process_start_time(hub)},
    )
    _, code, lines = run(forge, tmp_path, 3, "hub-stop@step=1", "hub-kill@step=3")
    assert (code, len(lines)) == (0, 3)
    deadline = time.monotonic() + 10
    pid, status = 0, 0
    while not pid and time.monotonic() < deadline:
        pid, status = os.waitpid(hub, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == -9


def test_a_fault_that_never_fired_is_said_with_the_reason(tmp_path: Path, forge: Forge) -> None:
    reasons = {
        "overflow@step=4..9": "the run ended after step 3",
        "overflow@step=2,micro=7": "no micro-batch 7 there, the last one was 2 (from 0)",
        "nan@step=2,micro=3,module=1": "no micro-batch 3 there, the last one was 2 (from 0)",
        "overflow@step=2,param=head.weight": "no parameter head.weight in the optimizer",
        "nan@step=3,micro=1,module=head": "no module head was found",
        "slow@step=2,phase=saving": "phase saving was not seen to begin there",
    }
    # Fired at one of its steps is fired; one for another rank is not this rank's to tell of.
    silent = ["overflow@step=3..9,micro=1", "overflow@step=2,rank=1"]
    with listening(tmp_path) as listener:
        spec = specification(tmp_path, inject=[*reasons, *silent])
        process = forge.run(SCRIPT, tmp_path, "3", specification=spec)
        listener.follow(process)
    stdout, stderr = process.communicate()
    assert [line.split()[1] for line in stdout.decode().splitlines()] == ["True", "True", "False"]
    said = [line for line in stderr.decode().splitlines() if "--inject" in line]
    assert said == [f"mpwatch: --inject {text} never fired: {why}" for text, why in reasons.items()]
    assert [event.fault for event in listener.of(FaultInjected)] == ["overflow"]
    assert len(listener.of(AgentExited)) == 1
    # The same directory is that of the next attempt: what fired in the first is not said there.
    with listening(tmp_path) as listener:
        (tmp_path / "rank-1-0").unlink()
        spec = specification(tmp_path, inject=[*reasons, *silent])
        process = forge.run(SCRIPT, tmp_path, "1", specification=spec)
        listener.follow(process)
    assert b"micro=1 never" not in process.communicate()[1]
