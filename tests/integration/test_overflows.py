"""An overflow in a run started as a person starts it: named in `show`, drawn, said at the end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runs import Place, without_our_lines
from tests.support.forge import Forge

LOOP = str(Path(__file__).resolve().parents[1] / "support" / "windowed_loop.py")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


def test_an_overflow_is_named_and_nothing_else_changes(place: Place, forge: Forge) -> None:
    inject = "overflow@step=5,micro=1,param=0.weight"
    done = place.mpwatch("run", "--headless", "--inject", inject, *forge.interpreter, LOOP, "8")
    assert done.returncode == 0
    # Step 5 is skipped and the scale halved, as the script itself saw it; nothing else is.
    told = [line.split()[:3] for line in done.stdout.decode().splitlines()]
    assert [words[1] for words in told] == ["True"] * 4 + ["False"] + ["True"] * 3
    assert [float(words[2]) for words in told] == [1024.0] * 4 + [512.0] * 4
    assert without_our_lines(done.stderr) == b""
    assert b"mpwatch:   step 5, micro-batch 1: inf in 0.weight (0), backward" in done.stderr

    shown = json.loads(place.mpwatch("show", "latest", "--json").stdout)
    assert (shown["applied"], shown["skipped"]) == (7, 1)
    (overflow,) = shown["overflows"]
    expected = {
        "step": 5,
        "micro_batch": 1,
        "parameter": "0.weight",
        "module": "0",
        "kind": "inf",
        "where": "backward",
        "loss_scale": 1024.0,
        "loss_scale_after": 512.0,
        "verdict": "bad_batch",
    }
    assert {key: overflow[key] for key in expected} == expected
    assert "4 windows before it were clean at scale 1024" in overflow["evidence"]
    assert shown["diagnoses"] == []
    assert shown["locate_us"] > 0

    gradients = place.mpwatch("show", "latest", "--gradients").stdout.decode()
    assert "gradients of step 2, unscaled, stored as float32; loss scale 1024" in gradients
    for row in ("all", "0", "2", "e4m3fn", "1024 (now)"):
        assert any(line.split("  ")[0].strip() == row for line in gradients.splitlines()), row
    assert "the narrowest headroom below 65504" in gradients
