"""Error classes and the exit codes they carry.

Every error that a person may see is one of these: one line with the cause and the next thing to
try. `mpwatch.cli.main` prints it and exits with its code; nothing else sets exit codes.
"""

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_NO_ANSWER = 3


class MpwatchError(Exception):
    """Base of all errors meant for a person; `exit_code` is what the process ends with."""

    exit_code = EXIT_REFUSED


class UsageError(MpwatchError):
    """The command line, a configuration file or a fault description cannot be used."""

    exit_code = EXIT_USAGE


class RunNotFound(UsageError):
    """No run, or more than one, answers to the name given."""


class NoAnswer(MpwatchError):
    """The job did not answer in time, or has ended and answers no more."""

    exit_code = EXIT_NO_ANSWER


class RecordUnreadable(UsageError):
    """The record is missing, foreign, newer than this version or damaged beyond salvage."""


class CodecError(MpwatchError):
    """A frame or message cannot be used; `category` is what receivers count it under.

    Categories: "malformed", "oversized", "version", "unknown".
    """

    def __init__(self, category: str, detail: str) -> None:
        super().__init__(f"{category}: {detail}")
        self.category = category


class RuntimeDirectoryRefused(MpwatchError):
    """The runtime directory is a link, belongs to someone else or cannot be made private."""
