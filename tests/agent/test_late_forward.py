"""Where a loss is known only after its backward (a device; here a CPU that is made to be late)."""

from pathlib import Path

import pytest

from mpwatch.events import HookDisabled, OverflowLocated
from tests.agent.test_locating import run
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "late_nan.py"
WATCHED = "forwards are watched"
CASES = {
    # name: (arguments of the script, settings, (step, module, words of the evidence) of each)
    "from a step on, with a scaler": (
        ("scaler", "8", "body.2:4"),
        {},
        [
            (4, None, "known on a device when its forward is over"),
            (5, "body.2", "the inputs of body.2 were finite (between 0 and"),
            (6, None, WATCHED),
            (7, "body.2", "its output was not: NaN"),
            (8, None, WATCHED),
        ],
    ),
    "an operation in place": (
        ("scaler", "3", "body.1:2"),
        {},
        [(2, None, WATCHED), (3, "body.1", "the inputs of body.1 were finite (between -")],
    ),
    "once": (("scaler", "7", "first:3-3"), {}, [(3, None, "--locate full holds the inputs")]),
    "once, with the inputs held": (
        ("scaler", "7", "first:3-3", "last:5-5"),
        {"locate": "full"},
        [(3, "first", "the inputs of first were finite"), (5, "last", "output was not: NaN")],
    ),
    "once, and the input was changed": (
        ("changed", "4", "first:3-3"),
        {"locate": "full"},
        [(3, None, "its input has been changed in place since")],
    ),
    "without a scaler": (
        ("plain", "9", "first:3"),
        {"grad_norm_every": 0},
        # A loss is heard of one step later; then the next step is looked into, and it begins anew.
        [(5, "first", "the inputs of first were"), (8, "first", "the inputs of first were")],
    ),
    "healthy": (("scaler", "9", "first:99"), {}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_a_late_loss_is_looked_into(tmp_path: Path, forge: Forge, name: str) -> None:
    arguments, settings, expected = CASES[name]
    listener, stdout, _ = run(forge, tmp_path / "watched", SCRIPT, *arguments, **settings)
    (tmp_path / "plain").mkdir()
    unwatched = forge.run(SCRIPT, tmp_path / "plain", *arguments, specification=None)
    while unwatched.poll() is None:
        continue
    assert stdout == unwatched.communicate()[0].decode()
    located = listener.of(OverflowLocated)
    assert len(located) == len(expected)
    for each, (step, module, words) in zip(located, expected, strict=True):
        assert (each.step, each.module, each.where) == (step, module, "forward")
        assert words in each.evidence
        assert each.verdict == "forward"
    assert not listener.of(HookDisabled)
