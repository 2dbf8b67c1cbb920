"""`mpwatch run --accumulate K` as a person types it, against plain Python with K by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpwatch.cli import options
from mpwatch.cli.main import main
from mpwatch.errors import UsageError
from tests.support.agent_runs import plain_environment
from tests.support.forge import Forge

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "accumulated.py"
CASES = ("adamw-foreach-unscaled-clip-cosine", "gan", "epochs")


def test_the_weights_are_those_of_the_loop_written_by_hand(
    tmp_path: Path, forge: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ["-m", "mpwatch", "run", "--headless", "--runs-dir", "runs", "--accumulate", "4"]
    words = [sys.executable, *ours, str(SCRIPT), "plain", "4", *CASES]
    virtual = subprocess.run(
        words, cwd=tmp_path, env=plain_environment(), check=True, capture_output=True
    ).stdout
    assert len(virtual.splitlines()) == len(CASES)
    by_hand = forge.run(SCRIPT, tmp_path, "hand", "4", *CASES, specification=None)
    assert by_hand.wait() == 0
    assert by_hand.communicate()[0] == virtual
    (run_file,) = (tmp_path / "runs").glob("*/run.json")
    assert main(["show", "--json", str(run_file.parent)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["script_window"], shown["multiplier"], shown["accumulation_steps"]) == (1, 4, 4)
    assert shown["windows_dropped"] == 0
    (decision,) = shown["decisions"]
    assert (decision["step"], decision["action"]) == (0, "accumulate 4")
    assert main(["show", str(run_file.parent)]) == 0
    assert "4 micro-batches (1 of the script x 4)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("accumulate", "0", "from 1 to 1e+06"),
        ("accumulate", "x", "whole number"),
        ("schedule", "epochs", "updates, samples"),
        ("lr_rule", "cubic", "none, linear, sqrt, adascale, auto"),
        ("noise_scale", "-1", "a number of samples"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(name: str, value: str, said: str) -> None:
    option = options.BY_NAME[name]
    with pytest.raises(UsageError, match=re.escape(said)):
        options.checked(option, value, option.flag)
