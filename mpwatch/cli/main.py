"""The command `mpwatch`: a table of verbs, each a module that is imported only when chosen.

The one place that prints errors and sets exit codes. Nothing slow is imported here: `--help` has
a budget. A verb module's `add_arguments(parser)` declares, `run(arguments)` does and returns the
exit code; `own_words(words)`, where it has one, keeps words back from the parser (`run`'s script).
"""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NoReturn

from mpwatch import __version__
from mpwatch.errors import EXIT_OK, MpwatchError, UsageError

VERBS: Final = {
    "run": ("mpwatch.cli.run", "supervise a training script or any command"),
    "attach": ("mpwatch.cli.attach", "watch a running job in the terminal; it never notices"),
    "replay": ("mpwatch.cli.replay", "the same screen on the record of a run"),
    "ls": ("mpwatch.cli.ls", "list the runs of this directory"),
    "show": ("mpwatch.cli.show", "summary of one run, running or ended"),
    "tail": ("mpwatch.cli.tail", "print a run's events as they come"),
    "ctl": ("mpwatch.cli.ctl", "give a running job a command and wait for its outcome"),
    "config": ("mpwatch.cli.config", "print the resolved configuration with its origins"),
    "serve": ("mpwatch.cli.serve", ""),
    "plan": ("mpwatch.cli.plan", "say which configuration fits a card"),
}
SHORT_VERBS: Final = frozenset({"ls", "ctl"})


class Parser(argparse.ArgumentParser):
    """argparse with one line for a bad command line, and no guessing of cut-off flags."""

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise UsageError(f"{message}; see: {self.prog} --help")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter is no reason to fail. Closed streams are None.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except MpwatchError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has seen enough; nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _complain(UsageError(f"cannot write the output: {error.strerror}"))
    return code


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        raise UsageError("say what to do; see: mpwatch --help")
    verb, rest = words[0], list(words[1:])
    if verb in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK
    if verb in ("-V", "--version"):
        print(f"mpwatch {__version__}")
        return EXIT_OK
    if verb not in (known := _built_verbs()):
        what = "option" if verb.startswith("-") else "verb"
        verbs = ", ".join(name for name in known if VERBS[name][1])
        raise UsageError(f"no {what} {verb!r}; there are: {verbs}")
    module = _load(verb)
    parser = Parser(f"mpwatch {verb}", (module.__doc__ or "").partition("\n\n")[0])
    module.add_arguments(parser)
    own, kept = module.own_words(rest) if hasattr(module, "own_words") else (rest, None)
    arguments = _parse(parser, own)
    if arguments is None:
        return EXIT_OK
    if kept is not None:
        arguments.kept = kept
    return int(module.run(arguments))


def _load(verb: str) -> ModuleType:
    """Import the verb's module.

    msgspec asks typing_extensions, where that is installed, for names that typing has as well: a
    tenth of all that `ctl` costs. Hidden from it only for verbs that load nothing else of others.
    """
    name = "typing_extensions"
    hide = verb in SHORT_VERBS and name not in sys.modules
    if hide:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(VERBS[verb][0])
    finally:
        if hide:
            del sys.modules[name]


def _built_verbs() -> list[str]:
    """The verbs whose module is there: some belong to packages of work that land later."""
    here = os.path.dirname(__file__)
    return [verb for verb in VERBS if os.path.exists(os.path.join(here, f"{verb}.py"))]


def _parse(parser: Parser, words: list[str]) -> argparse.Namespace | None:
    """The arguments, or None when argparse has printed the help."""
    try:
        return parser.parse_args(words)
    except SystemExit:
        return None


def _overview() -> str:
    # A verb without a line is for programs: `serve` is what `watch()` calls.
    lines = [f"  {verb:8}{VERBS[verb][1]}" for verb in _built_verbs() if VERBS[verb][1]]
    return "\n".join(
        [
            "usage: mpwatch VERB [ARGUMENTS]      mpwatch VERB --help",
            "",
            "Supervise, observe and control PyTorch training without changing the script.",
            "",
            *lines,
            "",
            "RUN is an id, the start of one, a name, a directory, or latest.",
        ]
    )


def _complain(error: MpwatchError) -> int:
    text = " ".join(str(error).split())
    with contextlib.suppress(OSError, AttributeError, ValueError):
        print(f"mpwatch: {text}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
