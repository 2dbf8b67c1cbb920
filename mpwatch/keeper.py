"""The keeper: the smallest process that must not die. Spawns the script, waits, ends the hub.

Started by its path under `python -I -S`: standard library only, no package but our own few
modules. It passes signals and the exit code on, writes `keeper.jsonl` and looks at
`requests.jsonl`. Beneath a screen it is detached and holds the script's terminal as well. Nothing
that fails here but the spawn itself may change what the script does.
`mpwatch.cli.run` prepares the specification and execs into it.
"""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from typing import Any

if not __package__:
    # Found behind the standard library, never in front of it.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from mpwatch.group_witness import GroupWitness
from mpwatch.keeper_detached import DetachedOutput
from mpwatch.keeper_files import Journal, Requests, say
from mpwatch.keeper_hub import Hub
from mpwatch.spawning import (
    die_with,
    exit_of,
    given_environment,
    oom_kills,
    process_start_time,
    restore_signals,
    spawn,
)

TICK_S = 0.2
# How long the witness of the group gets to say that it heard a signal as well.
WITNESS_S = 0.1

# Blocked and read one by one, because only `siginfo` tells a terminal from `kill`.
PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGXCPU,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGIO,
        signal.SIGPWR,
        signal.SIGWINCH,
    }
)
WATCHED = PASSED_ON | {signal.SIGCHLD}
# From the kernel these come from the terminal, to its whole foreground group.
FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
ASKING_TO_END = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
# A script that ends this long after such a signal ended for another reason.
OBEYED_WITHIN_S = 60.0


class Keeper:
    """One run: its attempts, one after the other, and the hub beside them."""

    def __init__(self, specification: dict[str, Any], command: list[str]) -> None:
        self._spec = specification
        self._command = command
        self._mask = set(specification["signal_mask"])
        self._ignored = frozenset(
            number for number in WATCHED if signal.getsignal(number) is signal.SIG_IGN
        )
        directory = specification["run_directory"]
        self._journal = Journal(directory)
        self._requests = Requests(directory)
        hub = specification["hub"]
        log = os.path.join(directory, "hub.log")
        self._hub = Hub(hub, log, self._journal, self._mask) if hub else None
        # Where the script prints when it is detached from the terminal.
        self._output = (
            DetachedOutput(directory, self._journal) if specification["terminal"] else None
        )
        self._pid = 0
        self._witness: GroupWitness | None = None
        # Signals that came, and when: passed on once the witness has had its time.
        self._came: list[tuple[float, signal.Signals]] = []
        self._kill_at: float | None = None
        # The last signal that asks to end, and when it came.
        self._asked: tuple[str, float] | None = None
        self._stop_asked = False
        self._well = True

    def run(self) -> int:
        """Supervise to the end; returns the exit code of the run."""
        code = self._attempt(1)
        self._journal.write("ended")
        if self._hub is not None:
            with contextlib.suppress(OSError):
                self._hub.end()
        return code

    def _answer(self) -> None:
        """Say that the command is this process's to start: from here on nobody else may."""
        answer = self._spec.pop("answer", None)
        if answer is not None:
            with contextlib.suppress(OSError):
                os.write(answer, b".")
            os.close(answer)

    def _attempt(self, number: int) -> int:
        early = self._signal_before_start()
        self._answer()
        if early is not None:
            self._journal.write("exited", code=128 + early, signal=early.name, attempt=number)
            return 128 + early
        before = oom_kills()
        try:
            if self._output is not None:
                self._output.open()
            self._pid = spawn(self._command, self._environment(number), self._prepare)
        except OSError as error:
            code = 127 if error.errno == errno.ENOENT else 126
            say(f"cannot start {self._command[0]}: {error.strerror}")
            self._journal.write(
                "exited", code=code, signal=None, attempt=number, cause="not_started"
            )
            return code
        self._journal.write(
            "spawned", pid=self._pid, start_time=process_start_time(self._pid), attempt=number
        )
        if self._output is None:
            self._witness = GroupWitness(PASSED_ON)
        else:
            self._output.started(self._pid)
        code, name = exit_of(self._wait())
        if self._witness is not None:
            self._witness.end()
        if self._output is not None:
            self._output.finish(code)
        cause = self._cause(name, before)
        self._journal.write("exited", code=code, signal=name, attempt=number, **cause)
        return code

    def _signal_before_start(self) -> signal.Signals | None:
        """A signal that asked to end before there was a script to pass it to."""
        while (info := signal.sigtimedwait(PASSED_ON, 0)) is not None:
            number = signal.Signals(info.si_signo)
            closed = number is signal.SIGHUP and self._output is not None
            if not closed and number is not signal.SIGWINCH and number not in self._ignored:
                return number
        return None

    def _environment(self, attempt: int) -> dict[str, str]:
        environment = given_environment()
        agent = self._spec["agent"]
        if agent is not None:
            original = self._spec["agent"]["pythonpath"]
            paths = [self._spec["inject"], *([original] if original else [])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            filled = {**agent, "attempt": attempt, "keeper_pid": os.getpid()}
            if self._output is not None:
                filled["output"] = self._output.for_agent()
            environment["_MPWATCH_AGENT"] = json.dumps(filled, ensure_ascii=False)
        return environment

    def _prepare(self) -> None:
        if self._spec["die_with_keeper"]:
            die_with(int(self._spec["keeper_pid"]))
        if self._output is not None:
            self._output.enter()
        restore_signals(self._mask, self._ignored)

    def _wait(self) -> int:
        """Until the script is gone; everything else of this process happens in here."""
        while True:
            now = time.monotonic()
            self._send_due(now)
            try:
                if self._well:
                    self._tend(now)
            except Exception as error:
                # Whatever else breaks, the script keeps its supervisor and its exit code.
                say(f"the keeper goes on without a hub: {type(error).__name__}: {error}")
                self._well = False
            info = self._next_signal(WITNESS_S if self._came else TICK_S)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._note(signal.Signals(info.si_signo), info.si_code)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return status

    def _next_signal(self, seconds: float) -> "signal.struct_siginfo | None":
        """The next signal within `seconds`; beneath a screen this is where output is read."""
        if self._output is None:
            return signal.sigtimedwait(WATCHED, seconds)
        self._output.wait(seconds)
        return signal.sigtimedwait(WATCHED, 0)

    def _send_due(self, now: float) -> None:
        for came in [came for came in self._came if came[0] <= now - WITNESS_S]:
            self._came.remove(came)
            self._pass_on(came[1], came[0])
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._send(signal.SIGKILL)

    def _tend(self, now: float) -> None:
        for request in self._requests.new():
            if request == "stop_now" and not self._stop_asked:
                self._stop_asked = True
                self._send(signal.SIGTERM)
                self._kill_at = now + self._spec["grace_s"]
        if self._hub is not None:
            self._hub.tend(now)

    def _note(self, number: signal.Signals, code: int) -> None:
        """A signal came. A positive code means the kernel: from the terminal, for Ctrl+C."""
        if number is signal.SIGHUP and self._output is not None:
            return  # a terminal that closed; this one has another
        now = time.monotonic()
        if number in ASKING_TO_END:
            self._asked = (number.name, now)
        if code <= 0 or number not in FROM_TERMINAL:
            self._came.append((now, number))

    def _pass_on(self, number: signal.Signals, came: float) -> None:
        """Give the script what came for us alone; what came to the group, it has already."""
        with contextlib.suppress(OSError):
            in_group = os.getpgid(self._pid) == os.getpgrp()
            if in_group and self._witness and self._witness.heard(number, came - WITNESS_S):
                return
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, number)

    def _cause(self, name: str | None, before: tuple[str, int] | None) -> dict[str, object]:
        """What the keeper knows of why the script ended; nothing where it knows nothing."""
        if self._stop_asked:
            return {"cause": "stop_now"}
        after = oom_kills() if name == "SIGKILL" else None
        if before and after and before[0] == after[0] and after[1] > before[1]:
            return {"cause": "oom_kill", "by": after[0]}
        if self._asked is not None and time.monotonic() - self._asked[1] < OBEYED_WITHIN_S:
            return {"cause": "signalled", "by": self._asked[0]}
        return {}


def main(arguments: list[str]) -> int:
    """`keeper.py SPECIFICATION COMMAND...`; the specification is JSON from `mpwatch.cli.run`."""
    # From here to the exec of the script nothing can interrupt; the caller has blocked already.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    keeper = Keeper(json.loads(arguments[0]), arguments[1:])
    # An inherited SIG_IGN would have the kernel reap children, and their exit codes with them.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
