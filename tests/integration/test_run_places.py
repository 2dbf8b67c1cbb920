"""Where a run is kept, what run.json says, and what happens where nothing can be written."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpwatch import rendezvous
from tests.support.cli_runs import MPWATCH, Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.script("import sys; print('ran'); sys.exit(3)")
    yield place
    place.none_left()


def test_the_run_directory_is_private_and_kept_out_of_git(place: Place) -> None:
    assert place.mpwatch("run", "--name", "base", "script.py").returncode == 3
    directory = place.run()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory.parent / ".gitignore").read_text() == "*\n"
    for file in directory.iterdir():
        assert file.stat().st_mode & 0o077 == 0 or file.name == "run.json"


def test_run_file_says_what_ran_where(place: Place) -> None:
    git = place.directory / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text("0123456789" * 4 + "\n")
    place.mpwatch("run", "--name", "base", "--max-steps", "7", "script.py", "--token", "S3CRET")
    entry = place.run_file()
    assert entry["run_id"] == place.run().name
    assert entry["argv"][1:] == ["script.py", "--token", "[redacted]"]
    assert (entry["name"], entry["commit"]) == ("base", "0123456789" * 4)
    assert (entry["cwd"], entry["recorded"]) == (str(place.directory), True)
    assert entry["settings"]["max_steps"] == 7
    assert entry["keeper"].keys() == {"pid", "start_time"}
    written = b"".join(p.read_bytes() for p in place.run().iterdir() if p.is_file())
    assert b"S3CRET" not in written


@pytest.mark.parametrize("origin", ["flag", "environment", "file"])
def test_another_place_for_runs(place: Place, origin: str) -> None:
    words = {"flag": ["--runs-dir", "else/where"]}.get(origin, [])
    if origin == "environment":
        place.environment["MPWATCH_RUNS_DIR"] = "else/where"
    if origin == "file":
        (place.directory / "mpwatch.toml").write_text("runs_dir = 'else/where'\n")
    assert place.mpwatch("run", *words, "script.py").returncode == 3
    assert len(list((place.directory / "else" / "where").glob("*/run.json"))) == 1
    assert len(json.loads(place.mpwatch("ls", "--json", *words).stdout)) == 1


def test_default_place_unwritable_the_run_is_unrecorded_and_says_so_once(place: Place) -> None:
    (place.directory / "mpwatch-runs").write_text("a file is in the way")
    done = place.mpwatch("run", "script.py")
    assert (done.returncode, done.stdout) == (3, b"ran\n")
    assert done.stderr.startswith(b"mpwatch: runs unrecorded: cannot write to mpwatch-runs")
    assert done.stderr.count(b"\n") == 1
    (entry,) = json.loads(place.mpwatch("ls", "--json").stdout)
    assert (entry["recorded"], entry["state"], entry["exit_code"]) == (False, "crashed", 3)


def test_explicit_place_unwritable_is_an_error(place: Place) -> None:
    (place.directory / "occupied").write_text("")
    place.environment["MPWATCH_RUNS_DIR"] = "occupied/runs"
    done = place.mpwatch("run", "script.py")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"mpwatch: cannot write runs to occupied/runs")


def test_no_record_on_request(place: Place) -> None:
    assert place.mpwatch("run", "--no-record", "script.py").returncode == 3
    assert not (place.directory / "mpwatch-runs").exists()
    (entry,) = json.loads(place.mpwatch("ls", "--json").stdout)
    assert entry["recorded"] is False
    # From another directory it is nobody's business, over as it is.
    elsewhere = place.directory / "elsewhere"
    elsewhere.mkdir()
    assert json.loads(place.mpwatch("ls", "--json", cwd=elsewhere).stdout) == []


def test_from_a_directory_that_is_gone(place: Place) -> None:
    gone = place.directory / "gone"
    gone.mkdir()
    words = " ".join([*MPWATCH, "run", "--runs-dir", str(place.directory / "kept"), "$OLDPWD/s.py"])
    place.script("print('ran'); raise SystemExit(3)", "s.py")
    done = subprocess.run(
        ["sh", "-c", f"cd gone; rmdir ../gone; {words}"],
        cwd=place.directory,
        env=place.environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"ran\n", b"")
    (run,) = (place.directory / "kept").glob("2*")
    assert json.loads((run / "run.json").read_text())["cwd"] is None


def root_of(place: Place) -> Path:
    return place.temporary / f"mpwatch-{os.geteuid()}"


def test_a_linked_runtime_directory_is_refused_and_the_script_runs(place: Place) -> None:
    (place.directory / "elsewhere").mkdir(0o700)
    root_of(place).symlink_to(place.directory / "elsewhere")
    done = place.mpwatch("run", "script.py")
    assert (done.returncode, done.stdout) == (3, b"ran\n")
    assert done.stderr.startswith(b"mpwatch: runs unwatched: ")
    assert done.stderr.count(b"\n") == 1
    assert not any((place.directory / "elsewhere").iterdir())
    assert place.entry("exited")["code"] == 3


def test_a_runtime_directory_open_to_others_is_refused(place: Place) -> None:
    root_of(place).mkdir()
    root_of(place).chmod(0o777)
    done = place.mpwatch("run", "script.py")
    assert (done.returncode, done.stdout) == (3, b"ran\n")
    assert b"open to other users" in done.stderr


def test_nothing_at_all_possible_the_script_still_runs(place: Place) -> None:
    (place.directory / "mpwatch-runs").write_text("")
    root_of(place).write_text("")
    done = place.mpwatch("run", "script.py")
    assert (done.returncode, done.stdout) == (3, b"ran\n")
    assert all(line.startswith(b"mpwatch: ") for line in done.stderr.splitlines())


def test_a_working_directory_that_is_gone(place: Place) -> None:
    script = place.directory / "script.py"
    command = f'mkdir d; cd d; rmdir ../d; exec "$0" -m mpwatch run {script}'
    done = subprocess.run(
        [
            "bash",
            "-c",
            command,
            place.python("-c", "import sys; print(sys.executable)").stdout.decode().strip(),
        ],
        cwd=place.directory,
        env=place.environment,
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (3, b"ran\n")
    assert all(line.startswith(b"mpwatch: ") for line in done.stderr.splitlines())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_changes_nothing(place: Place) -> None:
    """Full from the start: unrecorded. Full later: the exit code is told all the same."""
    disk = place.directory / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        filler = (
            "try:\n    with open('fill', 'wb', 0) as f:\n        while True: f.write(b'x' * 512)\n"
        )
        filler += "except OSError: pass\n"
        place.script(filler + "print('filled')", "disk/fill.py")
        place.directory = disk
        first = place.mpwatch("run", "fill.py")
        assert (first.returncode, first.stdout) == (0, b"filled\n")
        assert place.entry("exited")["code"] == 0
        second = place.mpwatch("run", "fill.py")
        assert (second.returncode, second.stdout) == (0, b"filled\n")
        assert b"mpwatch: runs unrecorded" in second.stderr
        place.none_left()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_rendezvous_agrees_on_the_runtime_directory(place: Place) -> None:
    """Who knows the run directory finds the sockets without reading anything."""
    place.mpwatch("run", "script.py")
    hashed = rendezvous.runtime_directory(place.run()).name
    assert Path(place.run_file()["runtime_directory"]) == root_of(place) / hashed
