"""Commands take effect at boundaries only, once each, and the script ends as it is asked to."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpwatch import wire
from mpwatch.commands import (
    Command,
    CommandRequest,
    LocateOverflow,
    Pause,
    SetSampling,
    StopAtBoundary,
    Unpause,
)
from mpwatch.events import (
    AgentBound,
    AgentExited,
    AgentStopping,
    CommandApplied,
    CommandRefused,
    Heartbeat,
    StepFinished,
    TrainingPaused,
    TrainingUnpaused,
)
from tests.support.agent_runs import Listener, listening, specification
from tests.support.forge import Forge, ForgedRun

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "endless_loop.py"


def run(forge: Forge, directory: Path, *arguments: str, **settings: Any) -> ForgedRun:
    spec = specification(directory, **settings)
    return forge.run(SCRIPT, directory, *arguments, specification=spec)


def ask(listener: Listener, identifier: str, command: Command | msgspec.Raw) -> None:
    """Send a command the way a hub does."""
    raw = (
        command
        if isinstance(command, msgspec.Raw)
        else msgspec.Raw(msgspec.msgpack.encode(command))
    )
    request = msgspec.msgpack.encode(CommandRequest(id=identifier, command=raw))
    assert listener.peer is not None
    listener.socket.send_multipart([listener.peer, *wire.message(wire.COMMAND, request)])


def end(listener: Listener, process: ForgedRun) -> tuple[int, str, str]:
    listener.follow(process)
    stdout, stderr = process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


def outcomes(listener: Listener) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in [*listener.of(CommandApplied), *listener.of(CommandRefused)]:
        found.setdefault(event.id, []).append(event)
    return found


def test_a_conversation(tmp_path: Path, forge: Forge) -> None:
    with listening(tmp_path) as listener:
        process = run(forge, tmp_path)
        listener.until(AgentBound)
        listener.until(StepFinished, 5)
        ask(listener, "a", SetSampling(grad_norm_every=3, memory_every=0))
        first = listener.until(CommandApplied)
        assert (first.id, first.note) == ("a", "grad_norm_every=3 memory_every=0")
        ask(listener, "b", Pause())
        paused = listener.until(TrainingPaused)
        listener.until(Heartbeat, 2)
        assert listener.steps()[-1].step == paused.step
        # Asked twice under one id: answered twice, done once.
        ask(listener, "c", Unpause())
        ask(listener, "c", Unpause())
        listener.until(TrainingUnpaused)
        listener.until(StepFinished, paused.step + 5)
        ask(listener, "f", LocateOverflow(steps=7))
        armed = listener.until(CommandApplied, 5)
        assert armed.note == f"every gradient is watched up to step {armed.step + 7}"
        ask(listener, "d", msgspec.Raw(msgspec.msgpack.encode({"command": "fly"})))
        listener.until(CommandRefused)
        ask(listener, "e", StopAtBoundary())
        code, stdout, _ = end(listener, process)
    said = outcomes(listener)
    assert [event.command for event in said["c"]] == ["unpause", "unpause"]
    assert len(listener.of(TrainingUnpaused)) == 1
    assert {key: len(events) for key, events in said.items()} == {
        "a": 1,
        "b": 1,
        "c": 2,
        "d": 1,
        "e": 1,
        "f": 1,
    }
    assert "fly" in said["d"][0].reason
    steps = [step.step for step in listener.steps()]
    assert steps == list(range(1, len(steps) + 1))
    stopping = listener.of(AgentStopping)
    assert [event.reason for event in stopping] == ["stop_at_boundary"]
    assert code == 0
    assert stdout == f"cleaned up after {stopping[0].step}\n"
    assert stopping[0].step == said["e"][0].step == len(steps) == listener.of(AgentExited)[0].steps
    # No window was cut: nothing accumulated was left over.
    assert listener.of(AgentExited)[0].windows_open == 0


EAGER = f"""
import runpy
import mpwatch_agent.boundary
mpwatch_agent.boundary.HEARTBEAT_S = 0.0  # a beat is due in every round of a pause
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_no_heartbeat_follows_the_end_of_a_pause(tmp_path: Path, forge: Forge) -> None:
    script = tmp_path / "eager.py"
    script.write_text(EAGER)
    with listening(tmp_path) as listener:
        process = forge.run(script, tmp_path, specification=specification(tmp_path))
        listener.until(StepFinished)
        ask(listener, "a", Pause())
        listener.until(Heartbeat, 2)
        ask(listener, "b", Unpause())
        listener.until(TrainingUnpaused)
        listener.until(StepFinished, listener.of(TrainingPaused)[0].step + 1)
        ask(listener, "c", StopAtBoundary())
        assert end(listener, process)[0] == 0
    told = [type(event) for _, event in listener.events]
    assert Heartbeat in told[: told.index(TrainingUnpaused)]
    assert Heartbeat not in told[told.index(TrainingUnpaused) :]


def test_norms_follow_the_cadence_that_was_set(tmp_path: Path, forge: Forge) -> None:
    with listening(tmp_path) as listener:
        process = run(forge, tmp_path, max_steps=9, grad_norm_every=3, memory_every=4)
        code, *_ = end(listener, process)
    assert code == 0
    sampled = [step.step for step in listener.steps() if step.grad_norm is not None]
    assert sampled == [1, 4, 7]
    assert [step.step for step in listener.steps() if step.memory] == [1, 5, 9]


@pytest.mark.parametrize("mode", ["plain", "finally"])
def test_max_steps_ends_after_exactly_so_many(tmp_path: Path, forge: Forge, mode: str) -> None:
    with listening(tmp_path) as listener:
        code, stdout, stderr = end(listener, run(forge, tmp_path, mode, max_steps=7))
    assert (code, stdout, stderr) == (0, "cleaned up after 7\n", "")
    assert [step.step for step in listener.steps()] == [1, 2, 3, 4, 5, 6, 7]


def test_two_optimizers_stop_after_a_whole_round(tmp_path: Path, forge: Forge) -> None:
    with listening(tmp_path) as listener:
        code, stdout, _ = end(listener, run(forge, tmp_path, "gan", max_steps=5))
    assert (code, stdout) == (0, "cleaned up after 5\n")
    assert len(listener.steps(0)) == len(listener.steps(1)) == 5


def test_a_script_that_swallows_the_exit_gets_sigterm(tmp_path: Path, forge: Forge) -> None:
    with listening(tmp_path) as listener:
        code, stdout, _ = end(listener, run(forge, tmp_path, "swallow", max_steps=4))
    assert code == -15
    assert stdout.splitlines() == ["swallowed"] * 3
    assert len(listener.steps()) == 4
