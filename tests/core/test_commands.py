"""Words a person types become commands, and commands travel unchanged; bad ones are quoted."""

import msgspec
import pytest

from mpwatch import commands
from mpwatch.commands import LocateOverflow, Pause, SetSampling, StopAtBoundary, Unpause
from mpwatch.errors import UsageError


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["pause"], Pause()),
        (["pause", "stay=true"], Pause(stay=True)),
        (["unpause"], Unpause()),
        (["stop_at_boundary"], StopAtBoundary()),
        (["stop-at-boundary"], StopAtBoundary()),
        (["set_sampling", "10"], SetSampling(grad_norm_every=10)),
        (["locate_overflow", "50"], LocateOverflow(steps=50)),
        (["set_sampling", "grad-norm-every=10", "memory_every=0"],
         SetSampling(grad_norm_every=10, memory_every=0)),
    ],
)  # fmt: skip
def test_words_become_commands(words: list[str], command: commands.Command) -> None:
    assert commands.parse(words[0], words[1:]) == command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "there are: .*pause"),
        (["pause", "1", "2"], "takes 1 values at most"),
        (["pause", "for=ever"], "no field 'for'"),
        (["pause", "perhaps"], "stay"),
        (["set_sampling"], "needs one of grad_norm_every=N"),
        (["locate_overflow", "0"], "allowed are 1 to"),
        (["set_sampling", "-1"], "allowed are 0"),
        (["set_sampling", "often"], "grad_norm_every"),
    ],
)
def test_words_that_make_no_command_are_quoted(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        commands.parse(words[0], words[1:])


@pytest.mark.parametrize(
    "command", [Pause(stay=True), Unpause(), StopAtBoundary(), SetSampling(memory_every=3)]
)
def test_commands_travel_unchanged(command: commands.Command) -> None:
    data = msgspec.msgpack.encode(command)
    assert commands.decode(data) == command
    again = {"command": commands.name_of(command), **commands.arguments_of(command)}
    assert commands.decode(msgspec.msgpack.encode(again)) == command


@pytest.mark.parametrize(
    "body", [{}, {"command": "x"}, {"command": "pause", "y": 1}, {"command": "set_sampling"}, 1]
)
def test_commands_of_another_shape_are_refused(body: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        commands.decode(msgspec.msgpack.encode(body))


def test_every_command_is_known_by_its_word() -> None:
    assert set(commands.COMMANDS) >= {
        "pause",
        "unpause",
        "stop_at_boundary",
        "set_sampling",
        "locate_overflow",
        "set_accumulation",
        "set_scale",
        "set_scaler_policy",
    }
