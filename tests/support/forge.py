"""A process that has imported torch once and forks runs of scripts: a second each becomes a tenth.

Only for tests of the agent after its start; how it gets in is tested with real interpreters.
Protocol: one JSON object per line on stdin {script, arguments, directory, specification,
environment}; each run leaves `pid`, `stdout`, `stderr` and at its end `code` in its directory.
"""

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class ForgedRun:
    """A run made by the forge; looks like a Popen to the tests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        return int((self._directory / "pid").read_text())

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(OSError, ValueError):
                self.returncode = int((self._directory / "code").read_text())
        return self.returncode

    def communicate(self, timeout: float = 0) -> tuple[bytes, bytes]:
        """What it wrote; only after its end."""
        out, err = (self._directory / name for name in ("stdout", "stderr"))
        return out.read_bytes(), err.read_bytes()


class Forge:
    """The parent's side: starts the forge, asks it for runs, ends it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forge"],
            stdin=subprocess.PIPE,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        )

    def run(
        self,
        script: Path,
        directory: Path,
        *arguments: str,
        specification: dict[str, Any] | None,
        environment: dict[str, str] | None = None,
    ) -> ForgedRun:
        """Ask for one run in `directory`; `specification` None runs it unwatched."""
        assert self._process.stdin is not None
        request = {
            "script": str(script),
            "arguments": arguments,
            "directory": str(directory),
            "specification": specification,
            "environment": environment or {},
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return ForgedRun(directory)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _script(request: dict[str, Any], directory: Path) -> int:
    """In the script's process: put the agent on, run the script, end like an interpreter."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, number)
    script = request["script"]
    os.environ.update(request["environment"])
    sys.argv = [script, *request["arguments"]]
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
        # What the interpreter does before it calls the exception hook.
        sys.last_type, sys.last_value = type(error), error
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _supervise(request: dict[str, Any]) -> None:
    """In a process of its own: fork the script, wait for it, leave its exit code."""
    directory = Path(request["directory"])
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(_script(request, directory))
    (directory / "pid.new").write_text(str(pid))
    os.replace(directory / "pid.new", directory / "pid")
    _, status = os.waitpid(pid, 0)
    (directory / "code.new").write_text(str(os.waitstatus_to_exitcode(status)))
    os.replace(directory / "code.new", directory / "code")


def main() -> None:
    """Read requests until stdin is closed."""
    import torch
    import torch._dynamo
    import torch.utils.data

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `readline`, not iteration: nothing may be buffered when a child is forked.
    while line := sys.stdin.readline():
        if os.fork() == 0:
            _supervise(json.loads(line))
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main()
