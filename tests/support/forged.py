"""Stands for a script's interpreter under `mpwatch run -- python -m tests.support.forged ...`.

    python -m tests.support.forged ADDRESS SCRIPT [ARGUMENTS]

Has a forge run the script on its own descriptors and in its own surroundings, with the agent that
the keeper meant for it, and ends as the script ended. Importing torch takes longer than a hub takes
to come up: so the script begins when there is one, or one has failed.
"""

import json
import os
import signal
import sys
from pathlib import Path

from mpwatch import rendezvous
from tests.support.cli_runs import keeper_entries, until
from tests.support.forge import ask


def hub_has_begun(directory: Path) -> bool:
    """Whether a hub serves, or one has ended."""
    if (directory / rendezvous.ENDPOINT_FILE).exists():
        return True
    return any(entry["event"] == "hub_exited" for entry in keeper_entries(directory))


def main() -> None:
    address, *words = sys.argv[1:]
    specification = os.environ.get("_MPWATCH_AGENT")
    agent = None if specification is None else json.loads(specification)
    if agent is not None:
        until(lambda: hub_has_begun(Path(agent["run_directory"])), "a hub")
    request = {
        "words": words,
        "specification": agent,
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
