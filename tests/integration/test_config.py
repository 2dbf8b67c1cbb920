"""Every option from every origin; a file that cannot be used is said, never ignored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.script("print('ran')")
    yield place
    place.none_left()


def settings(place: Place, *words: str, **environment: str) -> dict[str, Any]:
    done = place.mpwatch("config", "--json", *words, environment=environment)
    assert done.stderr == b""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_flag_wins_over_environment_over_file_over_default(place: Place) -> None:
    (place.directory / "mpwatch.toml").write_text("max_steps = 1\nmemory-every = 5\ngrace = 2.5\n")
    found = settings(place, "--max-steps", "3", MPWATCH_MAX_STEPS="2", MPWATCH_MEMORY_EVERY="4")
    assert found["max_steps"] == {"value": 3, "origin": "flag --max-steps"}
    assert found["memory_every"] == {"value": 4, "origin": "environment MPWATCH_MEMORY_EVERY"}
    assert found["grace"] == {"value": 2.5, "origin": "mpwatch.toml"}
    assert found["headless"] == {"value": False, "origin": "default"}


def test_a_mistyped_variable_is_named_and_harms_nothing(place: Place) -> None:
    done = place.mpwatch("run", "script.py", environment={"MPWATCH_MAXSTEPS": "2"})
    assert (done.returncode, done.stdout) == (0, b"ran\n")
    told = b"mpwatch: environment: MPWATCH_MAXSTEPS (is MPWATCH_MAX_STEPS meant?) is no variable"
    assert [line.startswith(told) for line in done.stderr.splitlines()] == [True]
    done = place.mpwatch("config", environment={"MPWATCH_MAXSTEPS": "2"})
    assert (done.returncode, done.stderr.startswith(told)) == (0, True)
    # Turned off: no line.
    off = {"MPWATCH_MAXSTEPS": "2", "MPWATCH_DISABLED": "1"}
    assert place.mpwatch("run", "script.py", environment=off).stderr == b""


def test_a_projects_file_is_read_where_there_is_no_own_one(place: Place) -> None:
    project = place.directory / "pyproject.toml"
    project.write_text("[project]\nname = 'x'\n[tool.mpwatch]\nname = 'base'\ninject = []\n")
    assert settings(place)["name"] == {
        "value": "base",
        "origin": "pyproject.toml [tool.mpwatch]",
    }
    (place.directory / "mpwatch.toml").write_text("max_steps = 1\n")
    assert settings(place)["name"]["origin"] == "default"


def test_a_projects_file_that_is_not_about_us_is_left_alone(place: Place) -> None:
    (place.directory / "pyproject.toml").write_text("broken = = toml")
    assert settings(place)["name"]["origin"] == "default"


def test_faults_from_flag_environment_and_file(place: Place) -> None:
    two = ["overflow@step=2,micro=1", "slow@step=1..3"]
    by_flag = settings(place, "--inject", two[0], "--inject", two[1])
    assert by_flag["inject"]["value"] == two
    assert settings(place, MPWATCH_INJECT=";".join(two))["inject"]["value"] == two
    (place.directory / "mpwatch.toml").write_text(f"inject = {two}\n")
    assert settings(place)["inject"]["value"] == two


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_step = 1", "unknown key 'max_step'"),
        ("max_steps = 'x'", "max_steps: 'x' is not a whole number"),
        ("max_steps = 1.5", "max_steps: 1.5 is not a whole number"),
        ("max_steps = true", "max_steps: True is not a whole number"),
        ("headless = 3", "headless: 3 is neither true nor false"),
        ("inject = ['nonsense']", "no fault 'nonsense'"),
        ("inject = 3", "no list of faults"),
        ("name = ''", "no text"),
        ("= broken", "is not TOML"),
        ("plan = 3", "plan is no table"),
        ("[plan]\nnonsense = 1", "[plan] has an unknown key 'nonsense'"),
    ],
)
def test_a_bad_file_is_one_line(place: Place, text: str, said: str) -> None:
    (place.directory / "bad.toml").write_text(text + "\n")
    done = place.mpwatch("run", "--headless", "--config", "bad.toml", "script.py")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"mpwatch: ")
    assert done.stderr.count(b"\n") == 1
    assert said in done.stderr.decode()


def test_a_plans_precision_is_applied_and_the_rest_is_named(place: Place) -> None:
    plan = place.directory / "plan.toml"
    plan.write_text(
        "[plan]\nprecision = 'O1:fp16'\nmicro_batch = 8\naccumulation_steps = 4\nfits = true\n"
        "batch = 32\nfamily = 'exact'\npeak_bytes = 1\nlabel = 'estimated'\n"
    )
    done = place.mpwatch("run", "--headless", "--config", "plan.toml", "script.py")
    assert (done.returncode, done.stdout) == (0, b"ran\n")
    assert done.stderr.decode().splitlines() == [
        "mpwatch: plan: precision = O1:fp16 is applied; --precision O0 leaves the script's own",
        "mpwatch: plan: micro_batch = 8 is not applied by itself; the script's own stays",
        "mpwatch: plan: accumulation_steps = 4 is not applied by itself; give --accumulate K, with"
        " K = 4 / the micro-batches that the script gathers for a step by itself",
    ]
    known = settings(place, "--config", "plan.toml")["precision"]
    assert known == {"value": "O1:fp16", "origin": "plan.toml [plan]"}
    # What was given by hand wins, and that is said.
    words = ["--config", "plan.toml", "--precision", "O0", "--accumulate", "2"]
    done = place.mpwatch("run", "--headless", *words, "script.py")
    told = done.stderr.decode().splitlines()
    assert told[0].endswith("precision = O1:fp16 gives way to O0 (flag --precision)")
    assert told[2].endswith("gives way to K = 2 (flag --accumulate), times the script's own")
    assert settings(place, *words)["precision"]["value"] == "O0"
    # Without its adapters a plan with LoRA is another one.
    plan.write_text("[plan]\nprecision = 'O2:fp16'\nfamily = 'lora'\n")
    assert settings(place, "--config", "plan.toml")["precision"]["value"] is None
    plan.write_text("[plan]\nprecision = 'half'\n")
    done = place.mpwatch("run", "--headless", "--config", "plan.toml", "script.py")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"plan.toml [plan]: precision: 'half' is no precision" in done.stderr


def test_the_table_is_for_people(place: Place) -> None:
    done = place.mpwatch("config", "--name", "base")
    rows = [line.split(maxsplit=2) for line in done.stdout.decode().splitlines()]
    assert ["name", "base", "flag --name"] in rows
    assert ["max_steps", "-", "default"] in rows
    # What the agent does when nobody says otherwise is said as well.
    assert ["grad_norm_every", "50", "default"] in rows
