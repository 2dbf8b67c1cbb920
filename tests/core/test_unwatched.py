"""A script the agent could not get into: stderr says why, and so does `show` afterwards.

The script's own `torch` is an empty file here: what is tested happens where torch is imported.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from mpwatch import runs
from mpwatch.cli.main import main
from tests.core.test_runs import ENDED, EXITED, SPAWNED, directory, make_run
from tests.support.agent_runs import INJECT, SOURCES, plain_environment, specification

__all__ = ["directory"]  # the fixture
WHAT_IT_MEANS = "no process made an optimizer or ran a backward, or the script ran unwatched"


def state_lines(shown: str) -> list[str]:
    """The lines of the state: the first, and those that go on with it."""
    lines = shown.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("state "))
    after = next(i for i, line in enumerate(lines) if line.startswith("command "))
    return [line[13:] for line in lines[first:after]]


def run_script(
    place: Path, run_directory: Path, *path: str, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """A script in `place` that imports torch and its own `mpwatch`, under the agent."""
    script = place / "train.py"
    script.write_text("import torch, sys\nprint(sorted(n for n in sys.modules if 'mpw' in n))\n")
    (place / "torch.py").touch()
    given = json.dumps(specification(run_directory))
    environment = plain_environment(_MPWATCH_AGENT=given, PYTHONPATH=os.pathsep.join(path))
    done = subprocess.run(
        [interpreter, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    return done


def test_show_says_what_never_trained_can_mean(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(
        directory, "r", SPAWNED, EXITED, ENDED, argv=["train.py"], runtime_directory=str(tmp_path)
    )
    main(["show", str(path)])
    assert state_lines(capsys.readouterr().out) == [
        "never_trained, exit code 0",
        WHAT_IT_MEANS + ": see its stderr",
    ]
    # Whose agents bound did train: nothing to explain.
    (tmp_path / "rank-1-0").touch()
    main(["show", str(path)])
    assert state_lines(capsys.readouterr().out) == ["finished, exit code 0"]
    # Started without an agent: there is one meaning only.
    path = make_run(directory, "u", SPAWNED, EXITED, ENDED, argv=["train.py"], watched=False)
    main(["show", str(path)])
    assert state_lines(capsys.readouterr().out) == [
        "never_trained, exit code 0",
        "the script ran unwatched: see its stderr",
    ]


def test_a_folder_named_mpwatch_beside_the_script_is_said_to_hide_the_package(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(
        directory, "r", SPAWNED, EXITED, ENDED, argv=["train.py"], runtime_directory=str(tmp_path)
    )
    own = tmp_path / "mpwatch"
    own.mkdir()
    (own / "__init__.py").write_text("print('the script did not ask for this')\n")
    done = run_script(tmp_path, path, str(INJECT), SOURCES)
    reason = f"the folder {own}, where the script imports from, hides the package mpwatch"
    assert done.stderr == f"mpwatch: runs unwatched: {reason}\n"
    # Nothing of the script's own folder was run.
    assert done.stdout == "['mpwatch_agent', 'mpwatch_agent.entry']\n"
    main(["show", str(path)])
    assert state_lines(capsys.readouterr().out) == [
        "never_trained, exit code 0",
        WHAT_IT_MEANS,
        f"a process of it ran unwatched: {reason}",
    ]
    # The first reason stands.
    (path / "unwatched.txt").write_text("another\x1b[1m reason\nand a second line")
    found = runs.read_run(path)
    assert found is not None
    assert runs.unwatched_reason(found) == "another reason and a second line"


def test_an_interpreter_without_the_agent_leaves_the_reason_too(tmp_path: Path) -> None:
    # The folder that is put on the path, alone, and an interpreter that has no package at all.
    venv.create(tmp_path / "bare")
    bare = str(tmp_path / "bare" / "bin" / "python")
    alone = tmp_path / "inject"
    alone.mkdir()
    (alone / "sitecustomize.py").write_text((INJECT / "sitecustomize.py").read_text())
    for _ in range(2):
        done = run_script(tmp_path, tmp_path, str(alone), interpreter=bare)
        assert done.stderr.startswith("mpwatch: runs unwatched: ModuleNotFoundError: No module")
        assert done.stdout == "[]\n"
    left = (tmp_path / "unwatched.txt").read_text()
    assert f"mpwatch: runs unwatched: {left}" == done.stderr
