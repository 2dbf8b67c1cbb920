"""Child processes as the keeper makes them: spawned, told apart, their end understood.

Standard library only: the keeper runs where no package is found. The child gets the signal mask
and dispositions that the keeper was given, as if the keeper were not there.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable

Prepare = Callable[[], None]


def process_start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; together with the pid it names a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def oom_kills() -> tuple[str, int] | None:
    """How often the kernel killed for memory: ("cgroup" or "machine", count), the nearest first."""
    for source, path in _oom_counters():
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return source, int(value)
    return None


def _oom_counters() -> list[tuple[str, str]]:
    counters = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers and path != "/":
                counters.append(("cgroup", f"/sys/fs/cgroup{path}/memory.events"))
            elif "memory" in controllers.split(",") and path != "/":
                counters.append(("cgroup", f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return [*counters, ("machine", "/proc/vmstat")]


def spawn(command: list[str], environment: dict[str, str], prepare: Prepare) -> int:
    """Start `command`; `prepare` runs in the child, just before the exec. Returns its pid.

    `fork` rather than `posix_spawn`: a parent-death signal and an ignored SIGCHLD can only be set
    in the child, and this process has one thread.

    Raises:
        OSError: there is nothing to exec (the child's errno), or no room for a process.
    """
    failed, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            _execute(command, environment)
        except OSError as error:
            os.write(report, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(report)
    with open(failed, "rb") as file:
        number = file.read()
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return pid


def _execute(command: list[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A shell script without its first line: what a shell would do with it.
        os.execve("/bin/sh", ["sh", *command], environment)


def exit_of(status: int) -> tuple[int, str | None]:
    """A wait status as a shell sees it: (exit code or 128 + n, name of the signal or None)."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"SIG{-code}"
    return 128 - code, name


def given_environment() -> dict[str, str]:
    """The environment this process was given.

    Under a C locale Python sets LC_CTYPE for itself (PEP 538); a shell script would inherit it.
    """
    environment = dict(os.environ)
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        given = file.read()
        if given and not any(entry.startswith(b"LC_CTYPE=") for entry in given.split(b"\0")):
            environment.pop("LC_CTYPE", None)
    return environment


def restore_signals(mask: set[int], ignored: frozenset[signal.Signals]) -> None:
    """In a child: the mask and the dispositions that this process was given, not its own."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGCHLD):
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with(parent: int) -> None:
    """In a child: have the kernel kill it when `parent` (its only thread) ends."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
