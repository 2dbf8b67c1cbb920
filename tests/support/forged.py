"""Stands for a script's interpreter under `mpwatch run -- python -m tests.support.forged ...`.

    python -m tests.support.forged ADDRESS SCRIPT [ARGUMENTS]

Has a forge run the script on its own descriptors and in its own surroundings, with the agent that
the keeper meant for it, and ends as the script ended.
"""

import json
import os
import signal
import sys

from tests.support.forge import ask


def main() -> None:
    address, *words = sys.argv[1:]
    specification = os.environ.get("_MPWATCH_AGENT")
    request = {
        "words": words,
        "specification": None if specification is None else json.loads(specification),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
    }
    with ask(address, request, [0, 1, 2]) as connection:
        connection.settimeout(None)
        pid = int(connection.recv(100))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda given, _: os.kill(pid, given))
        code = int(connection.recv(100))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
