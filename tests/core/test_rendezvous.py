"""Where jobs and watchers meet: private directories, locks, identities, files that may be cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpwatch import rendezvous
from mpwatch.errors import RuntimeDirectoryRefused


def test_a_new_runtime_directory_is_private(tmp_path: Path) -> None:
    made = rendezvous.make_private(tmp_path / "runtime")
    assert made.stat().st_mode & 0o777 == 0o700
    assert rendezvous.make_private(made) == made


def test_a_linked_runtime_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeDirectoryRefused, match="link"):
        rendezvous.make_private(tmp_path / "link")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeDirectoryRefused):
        rendezvous.make_private(tmp_path / "file")


def test_an_open_runtime_directory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(RuntimeDirectoryRefused, match="chmod 700"):
        rendezvous.make_private(tmp_path / "open")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_a_foreign_runtime_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(RuntimeDirectoryRefused, match="belongs to user 12345"):
        rendezvous.make_private(tmp_path / "theirs")


def test_a_run_directory_has_one_runtime_directory_however_it_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    assert rendezvous.runtime_directory(run) == rendezvous.runtime_directory(tmp_path / "link")
    assert rendezvous.runtime_directory(run) != rendezvous.runtime_directory(tmp_path / "other")


def test_socket_paths_stay_short_under_a_long_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    runtime = rendezvous.runtime_directory(tmp_path)
    endpoint = rendezvous.watch_endpoint(runtime)
    path = endpoint.removeprefix("ipc://")
    assert len(os.fsencode(path)) <= rendezvous.MAX_SOCKET_PATH_BYTES


def test_a_socket_path_that_is_too_long_is_refused_before_binding(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirectoryRefused, match="107"):
        rendezvous.agent_endpoint(tmp_path / ("y" * 100))


def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    held = rendezvous.try_lock(tmp_path / "lock")
    assert held is not None
    assert rendezvous.try_lock(tmp_path / "lock") is None
    os.close(held)
    script = (
        "import sys; from pathlib import Path; from mpwatch import rendezvous;"
        "print(rendezvous.try_lock(Path(sys.argv[1])) is not None, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert rendezvous.try_lock(tmp_path / "lock") is None
        child.kill()
    held = rendezvous.try_lock(tmp_path / "lock")
    assert held is not None
    os.close(held)


def test_a_linked_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"symbolic links|loop"):
        rendezvous.try_lock(tmp_path / "lock")


def test_a_process_is_its_pid_and_its_start_time() -> None:
    started = rendezvous.process_start_time(os.getpid())
    assert started is not None
    assert rendezvous.is_alive(os.getpid(), started)
    assert rendezvous.is_alive(os.getpid(), None)
    assert not rendezvous.is_alive(os.getpid(), started + 1)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not rendezvous.is_alive(child.pid, None)
    child.wait()
    assert not rendezvous.is_alive(child.pid, None)
    assert rendezvous.process_start_time(child.pid) is None


def test_json_is_written_whole_and_read_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rendezvous.write_json(path, {"a": 1})
    assert rendezvous.read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    for text in ('{"a": 1', "[1]", "\xff", "[" * 100_000):
        path.write_text(text, "latin-1")
        assert rendezvous.read_json(path) is None
    assert rendezvous.read_json(tmp_path / "missing") is None


def test_a_cut_last_line_of_a_journal_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "keeper.jsonl"
    path.write_text('{"event": "spawned"}\nrubbish\n[1]\n{"event": "ended"}\n{"event": "hal')
    assert [entry["event"] for entry in rendezvous.read_json_lines(path)] == ["spawned", "ended"]
    assert rendezvous.read_json_lines(tmp_path / "missing") == []


def test_a_watcher_with_another_temporary_directory_finds_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    there = rendezvous.runtime_directory(run)
    rendezvous.write_json(run / rendezvous.RUN_FILE, {"runtime_directory": str(there)})
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert rendezvous.runtime_root() != there.parent
    assert rendezvous.runtime_directory(run) == there
