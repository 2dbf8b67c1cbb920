"""`--accumulate K` against the same loops with accumulation written by hand, bit for bit."""

from pathlib import Path

import pytest

from mpwatch.events import AccumulationChanged, AgentExited, HookDisabled
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "accumulated.py"
# All of them with K = 4, and a choice with K = 3, of which the reciprocal is rounded.
CASES: dict[int, list[str]] = {
    4: [],
    3: [
        "sgd-loop-none-clip-cosine", "adamw-foreach-scaled-free-none",
        "adam-fused-unscaled-clip-cosine", "overflow-adamw-fused-scaled",
        "overflow-sgd-foreach-unscaled", "bf16-loss", "gan", "rescaled", "given", "several",
        "taken", "conditional", "epochs", "reentrant", "twice",
    ],
}  # fmt: skip
# Divided once more than by hand, where nothing can be seeded: equal to rounding, exact for 2^n.
ROUNDED = {3: {"taken"}, 4: set()}


@pytest.mark.parametrize("k", CASES)
def test_every_loop_ends_as_if_written_by_hand(tmp_path: Path, forge: Forge, k: int) -> None:
    """Weights, optimizer state, scale, learning rate, norms: three optimizers in three kinds,
    with and without scaler, overflow, clip and schedule, and every style of clearing."""
    for name in ("hand", "plain"):
        (tmp_path / name).mkdir()
    by_hand = forge.run(SCRIPT, tmp_path / "hand", "hand", str(k), *CASES[k], specification=None)
    spec = specification(tmp_path / "plain", accumulate=k)
    with listening(tmp_path / "plain") as listener:
        virtual = forge.run(
            SCRIPT, tmp_path / "plain", "plain", str(k), *CASES[k], specification=spec
        )
        listener.follow(virtual, by_hand)
    wanted, got = (
        dict(line.split(maxsplit=1) for line in run.communicate()[0].decode().splitlines())
        for run in (by_hand, virtual)
    )
    assert (by_hand.returncode, virtual.returncode) == (0, 0), virtual.communicate()[1].decode()
    assert len(wanted) == len(CASES[k]) if CASES[k] else len(wanted) > 100
    assert {name for name in wanted if wanted[name] != got[name]} == ROUNDED[k]
    assert not listener.of(HookDisabled)
    assert [(e.multiplier, e.refused) for e in listener.of(AccumulationChanged)] == [(k, False)]
    first = listener.steps()
    assert [(s.script_window, s.multiplier, s.micro_batches) for s in first] == [(1, k, k)] * (
        12 // k
    )
    # The last loop has twelve micro-batches, two in each of its windows.
    assert listener.of(AgentExited)[0].windows_dropped == 6 % k
