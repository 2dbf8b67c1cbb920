"""Can an agent get into a command? Python's flags -I, -E and -S keep `sitecustomize` out.

Pure: it reads the words of the command and nothing else.
"""

import re
from collections.abc import Sequence
from typing import Final

_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*(?:t|d)?")
# Short flags that take a value: the rest of the cluster, or the next word.
_TAKES_VALUE: Final = frozenset("cmWXQ")


def isolating_flag(command: Sequence[str]) -> str | None:
    """The flag of a Python command line that keeps the agent out, or None.

    Example:
        >>> isolating_flag(["/usr/bin/python3", "-BI", "train.py"])
        '-I'
    """
    if not _PYTHON.fullmatch(command[0].rpartition("/")[2]):
        return None
    words = iter(command[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
        elif not word.startswith("-") or word in ("-", "--"):
            return None
        elif not word.startswith("--"):
            for position, letter in enumerate(word[1:], 2):
                if letter in "IES":
                    return f"-{letter}"
                if letter in "cm":
                    return None
                if letter in _TAKES_VALUE:
                    if position == len(word):
                        next(words, None)
                    break
    return None
