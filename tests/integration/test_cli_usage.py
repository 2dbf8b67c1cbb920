"""Bad usage is one line and exit code 2, whatever is wrong; nothing slow is imported to say so."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runs import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.script("print('ran')")
    place.script("import no_such", "readable.py")
    (place.directory / "folder").mkdir()
    yield place
    place.none_left()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to do"),
        (["nonsense"], "no verb 'nonsense'"),
        (["--nonsense"], "no option '--nonsense'"),
        (["run"], "say which script"),
        (["run", "--headless"], "say which script"),
        (["run", "--"], "say which script"),
        (["run", "-m"], "say which script"),
        (["run", "nowhere.py"], "no script nowhere.py"),
        (["run", "sh"], "mpwatch run -- sh"),
        (["run", "folder"], "folder is a directory"),
        (["run", "--", "no-such-command-at-all"], "no command"),
        (["run", "--nonsense", "script.py"], "no option --nonsense"),
        (["run", "--head", "script.py"], "no option --head"),
        (["run", "--headless=1", "script.py"], "ignored explicit argument"),
        (["run", "--name"], "expected one argument"),
        (["run", "--name", "a/b", "script.py"], "no name"),
        (["run", "--name", "latest", "script.py"], "cannot be a run's name"),
        (["run", "--max-steps", "0", "script.py"], "--max-steps: '0' is not a whole number"),
        (["run", "--max-steps", "1e3", "script.py"], "--max-steps: '1e3' is not a whole number"),
        (["run", "--stall-after", "nan", "script.py"], "--stall-after: 'nan'"),
        (["run", "--inject", "overflow", "script.py"], "say when"),
        (["run", "--inject", "nonsense@step=1", "script.py"], "no fault 'nonsense'"),
        (["run", "--config", "nowhere.toml", "script.py"], "cannot read nowhere.toml"),
        (["run", "--runs-dir", "script.py", "script.py"], "cannot write runs to script.py"),
        (["show"], "no runs in mpwatch-runs"),
        (["show", "2026"], "no run '2026'"),
        (["show", "./folder"], "no run in folder"),
        (["tail", "latest"], "no runs"),
        (["tail", "--after", "x"], "invalid int value"),
        (["ctl"], "required"),
        (["ctl", "latest", "nonsense"], "no command 'nonsense'"),
        (["ctl", "latest", "set_sampling"], "set_sampling"),
        (["ctl", "latest", "set_sampling", "grad_norm_every=-1"], "grad_norm_every is -1"),
        (["ctl", "latest", "pause", "--timeout", "0"], "--timeout 0"),
        (["ls", "extra"], "unrecognized arguments"),
        (["config", "--max-steps", "x"], "--max-steps"),
    ],
)
def test_one_line_and_exit_code_2(place: Place, words: list[str], said: str) -> None:
    done = place.mpwatch(*words)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"mpwatch: ")
    assert done.stderr.count(b"\n") == 1
    assert said in done.stderr.decode()
    assert not place.runs()


def test_what_a_person_typed_cannot_command_the_terminal(place: Place) -> None:
    for words in (["\x1b]0;x\x07"], ["run", "--\x1b[2J", "x"], ["run", "\x1b[2J.py"]):
        done = place.mpwatch(*words)
        assert done.returncode == 2
        assert b"\x1b" not in done.stderr


@pytest.mark.parametrize("words", [["--headless"], ["--lr", "1", "--max-steps=3"]])
def test_an_option_of_ours_after_the_script_is_refused(place: Place, words: list[str]) -> None:
    done = place.mpwatch("run", "script.py", *words)
    assert (done.returncode, done.stdout) == (2, b"")
    flag = words[-1].partition("=")[0]
    assert done.stderr.decode() == (
        f"mpwatch: {flag} is mpwatch's and comes before the script: "
        f"mpwatch run {flag} ... script.py "
        "(if it is the script's: mpwatch run -- python script.py ...)\n"
    )
    assert not place.runs()


def test_an_option_that_the_script_has_itself_is_the_scripts(place: Place) -> None:
    place.script("import sys; print(sys.argv[1:])  # knows --max_steps", "own.py")
    done = place.mpwatch("run", "own.py", "--max-steps", "3", "--name", "x", "--", "--headless")
    assert done.stdout == b"['--max-steps', '3', '--name', 'x', '--', '--headless']\n"
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_and_version(place: Place) -> None:
    assert place.mpwatch("--version").stdout == b"mpwatch 0.1.0\n"
    overview = place.mpwatch("--help").stdout.decode()
    for verb in ("run", "ls", "show", "tail", "ctl", "config"):
        assert f"\n  {verb} " in overview
        done = place.mpwatch(verb, "--help")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(f"usage: mpwatch {verb}".encode())


def test_head_ends_it_silently(place: Place) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mpwatch --help | head -c 1; echo ${{PIPESTATUS[0]}}"],
        cwd=place.directory,
        env={**place.environment, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        timeout=30,
    )
    assert done.stderr == b""
    assert done.stdout.split() in ([b"u0"], [b"u141"])


def test_a_closed_pipe_is_silent(place: Place) -> None:
    command = f"{sys.executable} -m mpwatch config --json > >(exec true); wait $!"
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=place.directory,
            env=place.environment,
            capture_output=True,
            timeout=30,
        )
        assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], {"msgspec", "zmq", "json", "sqlite3"}),
        (["ls"], {"zmq"}),
        (["ctl", "latest", "pause"], set()),
    ],
)
def test_nothing_slow_is_imported(place: Place, words: list[str], heavy: set[str]) -> None:
    code = (
        "import sys; from mpwatch.cli.main import main\n"
        f"main({words!r}); print('\\n' + ' '.join(sys.modules))"
    )
    loaded = set(place.python("-c", code).stdout.decode().splitlines()[-1].split())
    assert "mpwatch.cli.main" in loaded
    never = {"asyncio", "numpy", "textual", "rich", "psutil", "importlib.metadata", "torch"}
    assert not loaded & (never | heavy)
