"""Which commit a working directory is at, read from git's files: no process is started for it."""

import os


def git_commit(directory: str) -> str | None:
    """The commit checked out in the repository around `directory`, or None where none is found."""
    try:
        git = _git_directory(os.path.abspath(directory))
        return None if git is None else _resolve_head(git)
    except (OSError, ValueError):
        return None


def _git_directory(directory: str) -> str | None:
    while True:
        candidate = os.path.join(directory, ".git")
        if os.path.isdir(candidate):
            return candidate
        if os.path.isfile(candidate):
            # A worktree or submodule: the file names the place.
            place = _first_line(candidate).removeprefix("gitdir: ")
            return os.path.join(directory, place)
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent


def _resolve_head(git: str) -> str | None:
    head = _first_line(os.path.join(git, "HEAD"))
    if not head.startswith("ref: "):
        return _commit(head)
    reference = head.removeprefix("ref: ")
    common = os.path.join(git, "commondir")
    roots = [git]
    if os.path.isfile(common):
        roots.append(os.path.join(git, _first_line(common)))
    for root in roots:
        loose = os.path.join(root, reference)
        if os.path.isfile(loose):
            return _commit(_first_line(loose))
    return _packed(os.path.join(roots[-1], "packed-refs"), reference)


def _packed(path: str, reference: str) -> str | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.rstrip("\n").endswith(" " + reference):
                return _commit(line.partition(" ")[0])
    return None


def _first_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline(4096).rstrip("\n")


def _commit(word: str) -> str | None:
    is_hash = len(word) in (40, 64) and all(letter in "0123456789abcdef" for letter in word)
    return word if is_hash else None
