"""Under the keeper a script finds and gives what it does under plain Python."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runs import Place, keeper_entries, without_our_lines


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.none_left()


ENDINGS = {
    "returns": "print('out')",
    "exit 7": "import sys; sys.exit(7)",
    "exit with text": "import sys; sys.exit('some text')",
    "exception": "def f():\n    raise ValueError('x' * 3)\nprint('before')\nf()",
    "syntax error": "print('never'\nx = = 1",
    "import error": "import no_such_module_here",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "chained exception": "try:\n    1/0\nexcept ArithmeticError as e:\n    raise OSError(1) from e",
    "at exit": "import atexit; atexit.register(lambda: print('late')); print('early')",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\nraise OSError(1)",
}


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS.keys())
def test_output_and_exit_code_are_those_of_plain_python(place: Place, text: str) -> None:
    script = place.script(text)
    plain = place.python(script)
    watched = place.mpwatch("run", "--headless", script)
    code = plain.returncode if plain.returncode >= 0 else 128 - plain.returncode
    assert (watched.returncode, watched.stdout) == (code, plain.stdout)
    assert without_our_lines(watched.stderr) == plain.stderr
    exited = next(e for e in keeper_entries(place.run()) if e["event"] == "exited")
    assert exited["code"] == code


def test_bytes_and_stdin_pass_untouched(place: Place) -> None:
    script = place.script(
        "import sys\n"
        "data = sys.stdin.buffer.read()\n"
        "sys.stdout.buffer.write(data[::-1]); sys.stderr.buffer.write(b'\\xff\\r\\x1b[31m' + data)"
    )
    given = bytes(range(256)) * 2000
    watched = place.mpwatch("run", "--headless", script, input=given)
    assert watched.stdout == given[::-1]
    assert watched.stderr == b"\xff\r\x1b[31m" + given


SURROUNDINGS = """
import json, os, sys
status = dict(l.rstrip().split(':\\t', 1) for l in open('/proc/self/status') if l[:3] == 'Sig')
environment = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', '_MPWATCH_AGENT')}
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "blocked": status["SigBlk"], "ignored": status["SigIgn"], "umask": os.umask(0o22),
    "descriptors": sorted(os.listdir('/proc/self/fd')), "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getsid(os.getppid()), "cwd": os.getcwd(), **environment}))
"""


def test_a_script_sees_the_surroundings_of_plain_python(place: Place) -> None:
    script = place.script(SURROUNDINGS)
    words = [script, "a b", "", "--flag", "-x", "\udcff"]
    plain, watched = place.python(*words), place.mpwatch("run", "--headless", *words)
    assert watched.stdout == plain.stdout


def test_a_module_runs_as_with_python_m(place: Place) -> None:
    (place.directory / "pack").mkdir()
    place.script("", "pack/__init__.py")
    place.script("from pack import __path__\nprint(__name__, __package__)", "pack/mod.py")
    plain = place.python("-m", "pack.mod", "--lr", "3")
    assert place.mpwatch("run", "-m", "pack.mod", "--lr", "3").stdout == plain.stdout


def test_any_command_runs_after_two_dashes(place: Place) -> None:
    command = ["sh", "-c", "echo out; echo err >&2; exit 9"]
    watched = place.mpwatch("run", "--headless", "--", *command)
    assert (watched.returncode, watched.stdout, watched.stderr) == (9, b"out\n", b"err\n")


def test_a_shell_script_without_its_first_line_runs(place: Place) -> None:
    (place.directory / "go").write_text("echo $1\n")
    (place.directory / "go").chmod(0o755)
    assert place.mpwatch("run", "--", "./go", "there").stdout == b"there\n"


def test_a_pipe_in_a_shell_ends_silently(place: Place) -> None:
    """SIGPIPE is not ignored in the command: `yes` dies of it instead of complaining."""
    watched = place.mpwatch("run", "--", "sh", "-c", "yes | head -1")
    assert (watched.stdout, watched.stderr) == (b"y\n", b"")


def test_an_extra_descriptor_reaches_the_script_and_not_the_hub(place: Place) -> None:
    script = place.script("import os; os.write(int(__import__('sys').argv[1]), b'hello')")
    # Read to the end of the file: it comes only when nobody holds the pipe any more.
    words = " ".join([sys.executable, "-m", "mpwatch", "run", "--headless", script, "3"])
    through = subprocess.run(
        ["bash", "-c", f"{{ {words} 3>&1 >&2; }} | cat"],
        cwd=place.directory,
        env=place.environment,
        capture_output=True,
        timeout=30,
    )
    assert through.stdout == b"hello"


def test_disabled_leaves_everything_alone(place: Place) -> None:
    script = place.script(
        "import os, sys; print(sys.argv, sorted(os.environ.items())); sys.exit(5)"
    )
    off = {"MPWATCH_DISABLED": "1"}
    plain = place.python(script, "x", environment=off)
    watched = place.mpwatch("run", "--headless", script, "x", environment=off)
    assert (watched.returncode, watched.stdout, watched.stderr) == (5, plain.stdout, plain.stderr)
    assert not place.runs()
    assert not any(place.temporary.iterdir())


def test_disabled_leaves_even_a_missing_script_to_python(place: Place) -> None:
    off = {"MPWATCH_DISABLED": "1"}
    plain = place.python("nowhere.py", environment=off)
    watched = place.mpwatch("run", "nowhere.py", environment=off)
    assert (watched.returncode, watched.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-S"], ["-BIu"]])
def test_an_interpreter_that_takes_no_agent_runs_unwatched(place: Place, flags: list[str]) -> None:
    script = place.script("print('runs')")
    watched = place.mpwatch("run", "--", sys.executable, *flags, script)
    assert (watched.returncode, watched.stdout) == (0, b"runs\n")
    assert watched.stderr.startswith(b"mpwatch: python -")
    assert watched.stderr.count(b"\n") == 1
    assert place.state() == "never_trained"


def test_a_run_inside_a_run_is_its_own(place: Place) -> None:
    place.script("import os; print(os.environ.get('PYTHONPATH'))", "inner.py")
    plain = place.python("inner.py")
    command = f"{sys.executable} -m mpwatch run --headless inner.py"
    watched = place.mpwatch("run", "--headless", "--", "sh", "-c", command)
    inject = watched.stdout.split(b":", 1)
    assert inject[0].endswith(b"inject")
    assert inject[1] == plain.stdout
    assert len(place.runs()) == 2
