"""From the environment to an agent: waits for the script to import torch, then puts hooks on.

Runs inside `sitecustomize`, before the script: standard library only, nothing slow. torch is
never imported from here, since importing it earlier than the script does changes its threads.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ENVIRONMENT_KEY = "_MPWATCH_AGENT"
# A module that only our package has, and where in the run directory the reason is left.
OURS = ("rendezvous.py", "rendezvous.pyc")
UNWATCHED_FILE = "unwatched.txt"


def begin(specification: str) -> None:
    """Read what the keeper left in the environment and wait for torch.

    Raises:
        ValueError: the specification is no JSON object.
    """
    spec = json.loads(specification)
    if not isinstance(spec, dict):
        raise ValueError(f"{ENVIRONMENT_KEY} holds no object")
    if "torch" in sys.modules:
        _install(spec)
    else:
        sys.meta_path.insert(0, _TorchFinder(spec))


def _install(spec: dict[str, Any]) -> None:
    try:
        hidden_by = _hiding()
        if hidden_by is not None:
            _say_unwatched(spec, f"{hidden_by} hides the package mpwatch")
            return
        from mpwatch_agent.agent import install_for_run

        install_for_run(spec)
    except Exception as error:
        # Whatever is wrong with this torch or with us, the script goes on without an agent.
        _say_unwatched(spec, f"{type(error).__name__}: {error}")


def _hiding() -> str | None:
    """What of the script is called mpwatch too and found first; it is not imported by us."""
    found = importlib.util.find_spec("mpwatch")
    if found is None:
        return None
    places = list(found.submodule_search_locations or ())
    if not places:
        return f"the file {found.origin}, where the script imports from,"
    folders = [place for place in places if os.path.isdir(place)]  # not one inside an archive
    ours = [os.path.join(place, name) for place in folders for name in OURS]
    if not folders or any(map(os.path.exists, ours)):
        return None
    return f"the folder {folders[0]}, where the script imports from,"


def _say_unwatched(spec: dict[str, Any], reason: str) -> None:
    """On stderr, and in the run directory for `show`; the first reason stands."""
    with contextlib.suppress(OSError):
        os.write(2, f"mpwatch: runs unwatched: {reason}\n".encode(errors="replace"))
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        path = os.path.join(spec["run_directory"], UNWATCHED_FILE)
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(f"{reason}\n")


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Answers once, for "torch": the real spec, with our work appended to its execution."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._pid = os.getpid()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        # A fork before the import (a server's worker) is another process: it stays alone.
        if found is not None and found.loader is not None and os.getpid() == self._pid:
            found.loader = _LoaderThenHooks(found.loader, self._spec)
        return found


class _LoaderThenHooks(importlib.abc.Loader):
    """torch's own loader; after the module ran, puts itself out of the way and the hooks on."""

    def __init__(self, loader: Any, spec: dict[str, Any]) -> None:
        self._loader = loader
        self._spec = spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _install(self._spec)
