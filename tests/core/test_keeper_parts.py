"""The keeper's small parts, each on its own: files, statuses, counters, interpreters."""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mpwatch import spawning
from mpwatch.cli.interpreter import isolating_flag
from mpwatch.group_witness import GroupWitness
from mpwatch.keeper_files import Journal, Requests
from mpwatch.keeper_output import OutputLog
from mpwatch.keeper_pty import PseudoTerminal
from mpwatch.rendezvous import read_json_lines
from mpwatch.spawning import exit_of, oom_kills, spawn


def test_a_torn_entry_does_not_swallow_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(str(tmp_path))
    journal.write("one", number=1)
    write = os.write
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        journal.write("two")
    with monkeypatch.context() as full_disk:

        def no_space(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "no space")

        full_disk.setattr(os, "write", no_space)
        journal.write("three")
    journal.write("four")
    entries = read_json_lines(tmp_path / "keeper.jsonl")
    assert [entry["event"] for entry in entries] == ["one", "four"]
    assert entries[0].keys() == {"event", "number", "time"}


def test_a_journal_that_cannot_be_opened_is_silent(tmp_path: Path) -> None:
    Journal(str(tmp_path / "missing")).write("event")
    (tmp_path / "keeper.jsonl").symlink_to(tmp_path / "elsewhere")
    Journal(str(tmp_path)).write("event")
    assert not (tmp_path / "elsewhere").exists()


def test_requests_are_taken_once_and_only_when_whole(tmp_path: Path) -> None:
    requests = Requests(str(tmp_path))
    assert requests.new() == []
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"request": "stop_now"}\n{"request": "res')
    assert requests.new() == ["stop_now"]
    assert requests.new() == []
    with path.open("ab") as file:
        file.write(b'tart"}\n\xff\n[]\n{}\n')
    assert requests.new() == ["restart", "None"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [(0, (0, None)), (7 << 8, (7, None)), (9, (137, "SIGKILL")), (15, (143, "SIGTERM"))],
)
def test_exit_codes_as_a_shell_sees_them(status: int, expected: tuple[int, str | None]) -> None:
    assert exit_of(status) == expected


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("import getpass; getpass.getpass()", True),
        ("input()", True),
        ("raise EOFError", False),
        ("print('getpass')", False),
    ],
)
def test_a_script_that_wanted_a_keyboard_is_known_by_its_last_words(
    tmp_path: Path, words: str, wanted: bool
) -> None:
    log = OutputLog(str(tmp_path), Journal(str(tmp_path)), own_lines=False)
    terminal = PseudoTerminal(log)
    pid = spawn([sys.executable, "-I", "-S", "-c", words], dict(os.environ), terminal.enter)
    terminal.started(pid)
    os.waitpid(pid, 0)
    terminal.drain()
    terminal.close()
    log.close()
    assert terminal.wanted_keyboard() is wanted
    printed = (tmp_path / "output.log").read_text()
    assert "EOFError" in printed or words.startswith("print")


def test_a_command_that_is_not_there_is_the_parents_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn([str(tmp_path / "nothing")], dict(os.environ), lambda: None)
    (tmp_path / "data").write_text("")
    with pytest.raises(PermissionError):
        spawn([str(tmp_path / "data")], dict(os.environ), lambda: None)


def test_the_nearest_counter_of_kills_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "events").write_text("low 0\nhigh 1\noom 5\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 8\n")
    near, far = ("cgroup", str(tmp_path / "events")), ("machine", str(tmp_path / "vmstat"))
    monkeypatch.setattr(spawning, "_oom_counters", lambda: [near, far])
    assert oom_kills() == ("cgroup", 3)
    (tmp_path / "events").write_text("")
    assert oom_kills() == ("machine", 8)
    (tmp_path / "vmstat").unlink()
    assert oom_kills() is None


def test_this_machine_counts_kills_somewhere() -> None:
    counted = oom_kills()
    assert counted is None or counted[1] >= 0


def test_the_witness_hears_the_group_and_not_one_process() -> None:
    """In a group of its own, so that nothing else of the test run hears anything."""
    answers, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            signals = {signal.SIGUSR1, signal.SIGUSR2}
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            witness = GroupWitness(signals)
            begin = time.monotonic()
            os.kill(os.getpid(), signal.SIGUSR1)
            os.killpg(0, signal.SIGUSR2)
            heard = []
            while not heard and time.monotonic() < begin + 20:
                heard = [n.name for n in signals if witness.heard(n, begin)]
            witness.end()
            os.write(mouth, json.dumps(heard).encode())
        finally:
            os._exit(0)
    os.close(mouth)
    with open(answers) as file:
        assert json.loads(file.read()) == ["SIGUSR2"]
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("python train.py", None),
        ("/usr/bin/python3.12 -I train.py", "-I"),
        ("python3 -BE train.py", "-E"),
        ("pypy3 -S -m mod", "-S"),
        ("python -Wignore -I x.py", "-I"),
        ("python -W ignore::DeprecationWarning -I x.py", "-I"),
        ("python -X importtime -u x.py -I", None),
        ("python -Ximporttime x.py -S", None),
        ("python -m mod -I", None),
        ("python -mmod -I", None),
        ("python -c pass -E", None),
        ("python -ic pass -E", None),
        ("python -uIc pass", "-I"),
        ("python -s -P x.py", None),
        ("python --check-hash-based-pycs always -I x.py", "-I"),
        ("python -", None),
        ("torchrun -I x.py", None),
        ("python-config -I", None),
        ("bash -c 'python -I x'", None),
    ],
)
def test_flags_that_keep_the_agent_out(words: str, flag: str | None) -> None:
    assert isolating_flag(words.split()) == flag
