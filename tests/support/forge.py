"""A process that has imported torch once and forks runs of scripts: a second each becomes a tenth.

Only for tests of what comes after the agent's start; how it gets in is tested with real
interpreters. `tests.support.forged` is how a script under `mpwatch run` comes here.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REQUEST_BYTES = 200_000


class ForgedRun:
    """A run made by the forge; looks like a Popen to the tests."""

    def __init__(self, directory: Path, connection: socket.socket) -> None:
        self._directory = directory
        self._connection = connection
        self.pid = int(connection.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = int(self._connection.recv(100))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float = 0) -> tuple[bytes, bytes]:
        """What it wrote; only after its end."""
        out, err = (self._directory / name for name in ("stdout", "stderr"))
        return out.read_bytes(), err.read_bytes()


class Forge:
    """The parent's side: starts the forge, asks it for runs, ends it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="forge-")
        self.address = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind(self.address)
            server.listen(100)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forge", str(server.fileno())],
                stdin=subprocess.PIPE,
                env=environment,
                cwd=ROOT,
                pass_fds=[server.fileno()],
            )

    def run(
        self,
        script: Path | str,
        directory: Path,
        *arguments: str,
        specification: dict[str, Any] | None,
        environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> ForgedRun:
        """Ask for one run, which leaves `stdout` and `stderr` in `directory`.

        `specification` None runs it unwatched.
        """
        request = {
            "words": [str(script), *arguments],
            "specification": specification,
            "environment": {**self.environment, **(environment or {})},
            "cwd": str(cwd),
        }
        with open(os.devnull) as stdin, contextlib.ExitStack() as files:
            written = [
                files.enter_context((directory / name).open("wb")) for name in ("stdout", "stderr")
            ]
            connection = ask(self.address, request, [file.fileno() for file in (stdin, *written)])
        return ForgedRun(directory, connection)

    @property
    def interpreter(self) -> list[str]:
        """Words for `mpwatch run`, before a script's: its process is forked here."""
        return ["--", sys.executable, "-m", "tests.support.forged", self.address]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._folder.cleanup()


def ask(address: str, request: dict[str, Any], descriptors: list[int]) -> socket.socket:
    """Ask for a run on `descriptors`; the connection says its process id, then its exit code."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(120.0)
    connection.connect(address)
    message = json.dumps(request).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    socket.send_fds(connection, [message], descriptors)
    return connection


def _script(request: dict[str, Any]) -> int:
    """In the script's process: put the agent on, run the script, end like an interpreter."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["words"]
    script = os.path.abspath(sys.argv[0])
    sys.path.insert(0, os.path.dirname(script))
    code = 0
    try:
        if request["specification"] is not None:
            from mpwatch_agent import agent

            agent.install_for_run(request["specification"])
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        # As the interpreter does it; a traceback begins with a frame of ours and two of runpy.
        sys.last_type, sys.last_value = type(error), error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _start(connection: socket.socket) -> int:
    """Fork the script that is asked for on `connection`; its process id."""
    message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(_script(json.loads(message)))
    for descriptor in descriptors:
        os.close(descriptor)
    _tell(connection, pid)
    return pid


def _tell(connection: socket.socket, number: int) -> None:
    # Who asked may be gone; the script goes on.
    with contextlib.suppress(OSError):
        connection.send(str(number).encode())


def main() -> None:
    """Fork a run for each connection until stdin is closed, then wait for those that run."""
    import torch
    import torch._dynamo
    import torch.utils.data

    torch.set_num_threads(1)
    # Collecting garbage must not write to what the runs share.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=int(sys.argv[1]))
    asked = True
    running: dict[int, tuple[int, socket.socket]] = {}
    while asked or running:
        ready = select.select([*([0, server] if asked else []), *running], [], [])[0]
        asked = asked and 0 not in ready
        for ended in running.keys() & set(ready):
            pid, connection = running.pop(ended)
            _tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            connection.close()
            os.close(ended)
        if server in ready:
            connection, _ = server.accept()
            pid = _start(connection)
            running[os.pidfd_open(pid)] = pid, connection


if __name__ == "__main__":
    main()
