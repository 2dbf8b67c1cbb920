"""Runs scripts as `python SCRIPT` would, forked off a process that has torch loaded already.

Started as a program by tests.support.style_runs; knows nothing of mpwatch. Takes one request a
line on stdin, a JSON object with `words` (script and arguments), `environment`, `stdout` and
`stderr` (files to write), and answers each with a line on stdout: the exit code.
"""

import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch
import torch._dynamo


def play_python(request: dict[str, Any]) -> None:
    """Become a fresh interpreter's `__main__`, as far as a script can tell."""
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = request["words"]
    sys.path[0] = os.getcwd()
    runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                play_python(json.loads(line))
                code = 0
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    assert torch.get_num_threads() == 1, "start this with OMP_NUM_THREADS=1: threads do not fork"
    main()
