"""Shows the screen under a guard: a process that puts the terminal back whatever becomes of it.

The guard forks before anything slow is imported, waits for the screen, restores the terminal and
says how to come back. `run`, `attach` and `replay` call `watch_in_terminal`; the screen itself is
`mpwatch_tui`, which only the child imports.
"""

import contextlib
import gc
import os
import signal
import sys
import termios
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from mpwatch.errors import EXIT_REFUSED, UsageError
from mpwatch.vocabulary import clean_text

INPUT, OUTPUT, ERRORS = 0, 1, 2
# Mouse reports (in pixels too), focus reports, bracketed paste, drawing at one stroke, reports of
# the size, kitty's keyboard flags and colours off; the cursor and the wrapping of long lines on.
PLAIN: Final = (
    "\x1b[?25h\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l"
    "\x1b[?1016l\x1b[?2026l\x1b[?2048l\x1b[<u\x1b[0m"
)
LEAVE_ALTERNATE_SCREEN: Final = "\x1b[?1049l"
SPEECHLESS_TERMINALS: Final = frozenset({"", "dumb", "unknown"})


def check_terminal(instead: str) -> None:
    """Refuse a terminal that cannot show the screen.

    Raises:
        UsageError: stdin or stdout is no terminal, or it is one that cannot move its cursor;
            the line names `instead`, what to do then.
    """
    for descriptor, name in ((INPUT, "stdin"), (OUTPUT, "stdout")):
        if not _is_terminal(descriptor):
            raise UsageError(f"{name} is not a terminal; use: {instead}")
    term = os.environ.get("TERM", "")
    if term in SPEECHLESS_TERMINALS:
        raise UsageError(
            f"this terminal (TERM={clean_text(term, 40)}) cannot show the screen; use: {instead}"
        )


def watch_in_terminal(
    run_directory: Path,
    *,
    readonly: bool = False,
    first: bool = False,
    ended: Callable[[], int | None] = lambda: None,
    replay: bool = False,
    plain_ascii: bool = False,
) -> int:
    """Show the run until the user leaves; returns the exit code.

    `first`: this is the screen of `mpwatch run` itself, whose exit code is the script's where the
    script has ended; `ended` says so where files cannot. `replay`: from the record alone.

    Raises:
        UsageError: this terminal cannot show the screen.
    """
    options = {
        "run_directory": run_directory,
        "readonly": readonly,
        "replay": replay,
        "plain_ascii": plain_ascii,
    }
    check_terminal(
        "mpwatch run --headless ..." if first else "mpwatch tail RUN, or mpwatch show RUN"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    status = _guarded(options)
    code = os.waitstatus_to_exitcode(status)
    known = ended()
    for line in farewell(run_directory, code, replay, known):
        with contextlib.suppress(OSError, ValueError):
            print(line, flush=True)
    if known is None and first:
        known = _code_of_ended(run_directory)
    if known is not None:
        return known
    return code if code >= 0 else 128 - code


def _guarded(options: dict[str, Any]) -> int:
    """Run the screen in a child and put the terminal back; returns the child's wait status."""
    saved = termios.tcgetattr(INPUT)
    guard = os.getpid()
    # A screen that ignores the end of its terminal would spin on it for ever.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Ctrl+C while the screen comes up would end it alone; once it is up, it asks what is meant.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = os.fork()
        if child == 0:
            _become_screen(options, guard)
        with _passing_signals_to(child):
            status = _wait(child)
        _restore(saved, left_by_itself=os.WIFEXITED(status))
    finally:
        signal.signal(signal.SIGINT, interrupt)
    return status


def _become_screen(options: dict[str, Any], guard: int) -> None:
    """In the child: show the screen and end, without returning into the guard's code."""
    code = EXIT_REFUSED
    try:
        # Textual draws on stderr, which may be a file.
        os.dup2(OUTPUT, ERRORS)
        # Looking for garbage while modules load is a quarter of the time to the first picture.
        gc.disable()
        from mpwatch.cli.revive import ensure_hub
        from mpwatch.stopping import stop_now
        from mpwatch_tui.entry import show

        code = show(**options, guard=guard, revive=ensure_hub, stop_now=stop_now)
    except ImportError as error:
        print(f"mpwatch: no screen: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: a thread that waits for a stopped hub must not hold the terminal.
        os._exit(code)


def _wait(child: int) -> int:
    while True:
        # Ctrl+C before the screen has the terminal is the child's to obey.
        with contextlib.suppress(KeyboardInterrupt):
            return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def _passing_signals_to(child: int) -> Iterator[None]:
    """Signals that mean "end" go to the screen, which then leaves the terminal clean."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _restore(saved: list[Any], left_by_itself: bool) -> None:
    """The terminal as it was: modes, screen, cursor; input that was meant for the screen is gone.

    A screen that ended by itself is off the alternate screen already; leaving it twice would put
    the cursor back over what was printed since.
    """
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError, termios.error):
            termios.tcflush(INPUT, termios.TCIFLUSH)
            termios.tcsetattr(INPUT, termios.TCSANOW, saved)
            text = PLAIN if left_by_itself else LEAVE_ALTERNATE_SCREEN + PLAIN
            os.write(OUTPUT, text.encode("ascii"))
    finally:
        signal.signal(signal.SIGTTOU, before)


def farewell(
    run_directory: Path, code: int, replay: bool, script_code: int | None = None
) -> list[str]:
    """What to say on the plain screen: how to come back, or how the run ended.

    `code` is the screen's own exit code, negative for a signal; `script_code` the script's where
    its keeper told it otherwise than through files.
    """
    from mpwatch import rendezvous, runs
    from mpwatch.glance import glance

    lines = []
    if code < 0:
        lines.append(f"mpwatch: the screen died of {signal.Signals(-code).name}")
    run = runs.read_run(run_directory)
    if replay:
        return lines
    if script_code is not None and (run is None or run.exit_code is None):
        text = "the run's files could not be written, or are gone"
        return [*lines, f"mpwatch: the script ended with exit code {script_code}; {text}"]
    if run is None:
        return lines
    name = _name_for_attach(run_directory, run.run_id)
    if runs.is_live(run):
        return [*lines, f"still running; come back with: mpwatch attach {name}"]
    record = (run_directory / rendezvous.RECORD_FILE).absolute()
    evidence = runs.with_agent_files(run, glance(record) if record.exists() else None)
    outcome: str = runs.state_of(run, evidence)
    if run.exit_code is not None:
        outcome += f", exit code {run.exit_code}"
    return [*lines, f"run {name}: {outcome}; see: mpwatch show {name}"]


def _name_for_attach(run_directory: Path, run_id: str) -> str:
    """The id where `mpwatch attach` finds it from here, else the directory."""
    from mpwatch.cli.configuration import runs_directory
    from mpwatch.errors import MpwatchError

    with contextlib.suppress(MpwatchError, OSError):
        if run_directory.absolute().parent.samefile(runs_directory(None)):
            return run_id
    return clean_text(str(run_directory.absolute()), 1000)


def _code_of_ended(run_directory: Path) -> int | None:
    """The script's exit code; None while it runs and where nobody saw its end."""
    from mpwatch import runs

    run = runs.read_run(run_directory)
    return None if run is None or runs.is_live(run) else run.exit_code


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
