"""Where a job says it is and where a watcher looks: run directory, runtime directory, locks.

The run directory holds what lasts; the runtime directory (owner only, below the temporary
directory) holds sockets and locks, since paths of sockets must be short and locks need a local
file system. Standard library only: the agent, the keeper's parent and every watcher call this.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
import zlib
from pathlib import Path
from typing import Any, Final

from mpwatch.errors import RuntimeDirectoryRefused

MAX_SOCKET_PATH_BYTES: Final = 107
ENDPOINT_FILE: Final = "endpoint.json"
RUN_FILE: Final = "run.json"
KEEPER_FILE: Final = "keeper.jsonl"
REQUESTS_FILE: Final = "requests.jsonl"
RECORD_FILE: Final = "record.sqlite"
HUB_LOG_FILE: Final = "hub.log"
OUTPUT_LOG: Final = "output.log"
# Written by the agent's entry, which cannot import this module there: it has the name itself.
UNWATCHED_FILE: Final = "unwatched.txt"
AGENT_SOCKET: Final = "agent.sock"
WATCH_SOCKET: Final = "watch.sock"
HUB_LOCK: Final = "hub.lock"
# A job on another machine of a shared file system cannot be looked up by pid: its files tell.
FOREIGN_SILENCE_S: Final = 120.0


def runtime_root() -> Path:
    """The owner's private directory for sockets and locks; not made or checked here."""
    name = f"mpwatch-{os.geteuid()}"
    # As `tempfile` does, without its imports: `ls` and `ctl` have a budget.
    given = os.environ.get("TMPDIR", "")
    root = Path(os.path.abspath(given) if os.path.isdir(given) else "/tmp") / name
    # A long TMPDIR would break the limit on socket paths; /tmp is the same for every process.
    longest = len(os.fsencode(root / ("x" * 12) / WATCH_SOCKET))
    return root if longest <= MAX_SOCKET_PATH_BYTES else Path("/tmp") / name


def runtime_directory(run_directory: Path) -> Path:
    """The runtime directory that belongs to `run_directory`; the same for whoever asks.

    run.json says where it is, so that a watcher with another TMPDIR meets the job all the same.
    """
    recorded = (read_json(run_directory / RUN_FILE) or {}).get("runtime_directory")
    if isinstance(recorded, str) and os.path.isabs(recorded) and _can_be_path(recorded):
        return Path(recorded)
    real = os.fsencode(os.path.realpath(run_directory))
    # 48 bits to tell a user's own runs apart; nobody else can enter the root.
    return runtime_root() / f"{zlib.crc32(real):08x}{zlib.crc32(real[::-1]) & 0xFFFF:04x}"


def _can_be_path(text: str) -> bool:
    """A damaged file may hold characters that no path can have; asking for it would raise."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def foreign_host(run_file: dict[str, Any]) -> str | None:
    """The machine that the run of this run.json is on, where that is not this one."""
    host = run_file.get("host")
    return host if isinstance(host, str) and host != os.uname().nodename else None


def written_lately(run_directory: Path) -> bool:
    """Whether something still writes the run's files: all there is to see of a foreign one."""
    newest = 0.0
    for name in (RECORD_FILE, f"{RECORD_FILE}-wal", KEEPER_FILE):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(run_directory / name).st_mtime)
    return time.time() - newest < FOREIGN_SILENCE_S


def make_private(path: Path) -> Path:
    """Make `path` (one level) a directory that only its owner can enter, or prove that it is one.

    Raises:
        RuntimeDirectoryRefused: it is a link, no directory, someone else's, or open to others
            and cannot be closed.
        OSError: it cannot be made (no space, read-only).
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirectoryRefused(f"{path} is a link or no directory; remove it or set TMPDIR")
    if found.st_uid != os.geteuid():
        raise RuntimeDirectoryRefused(f"{path} belongs to user {found.st_uid}; set TMPDIR")
    if found.st_mode & 0o077:
        raise RuntimeDirectoryRefused(f"{path} is open to other users; run: chmod 700 {path}")
    return path


def make_runtime_directory(run_directory: Path) -> Path:
    """Make and check the runtime directory of `run_directory`, its root included."""
    path = runtime_directory(run_directory)
    make_private(path.parent)
    return make_private(path)


def agent_endpoint(runtime: Path) -> str:
    """Where agents connect; known before a hub is there."""
    return _ipc(runtime / AGENT_SOCKET)


def watch_endpoint(runtime: Path) -> str:
    """Where watchers connect."""
    return _ipc(runtime / WATCH_SOCKET)


def _ipc(path: Path) -> str:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise RuntimeDirectoryRefused(
            f"socket path of {size} bytes, {MAX_SOCKET_PATH_BYTES} are possible: {path}"
        )
    return f"ipc://{path}"


def try_lock(path: Path) -> int | None:
    """Take an exclusive lock on `path`; the descriptor holds it for life. None: someone has it.

    A lock says that its holder lives; the file's existence says nothing.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def process_start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (clock ticks since boot), or None: not there, or no /proc.

    A pid alone is reused; pid and start time name a process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may contain spaces and parentheses: count from the last one.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, start_time: int | None) -> bool:
    """Whether the process `pid` that started at `start_time` still lives (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return _answers_signal(pid) if not os.path.isdir("/proc/self") else False
    except OSError:
        return False
    if fields[0] in (b"Z", b"X"):
        return False
    return start_time is None or int(fields[19]) == start_time


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None when it is missing, cut or something else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of an append-only file; a cut or foreign line is passed over."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return []
    entries = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                entries.append(entry)
    return entries


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` whole or not at all: a temporary file in the same directory, then a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
