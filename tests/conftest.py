"""Leak police: a test that leaves a thread, a process, a ZeroMQ context or a variable behind fails.

Also keeps the user's own configuration and runs out of every test.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from tests.support.agent_runs import plain_environment
from tests.support.forge import Forge

OURS = ("MPWATCH_", "_MPWATCH")
PATIENCE_S = 5.0
# Hundreds of processes import our modules: one of them compiles, wherever it may be written down.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads spin where cores are shared; what is trained here is too small for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# First: pytest-xdist's own hook reads the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something dear stay together on one worker: a file's, or a style's."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        style = None if callspec is None else callspec.params.get("style")
        group = item.path.stem if style is None else f"style-{style.name}"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """One for all tests of a worker: torch is imported once."""
    forge = Forge(plain_environment())
    yield forge
    forge.close()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compare threads, children, contexts and environment before and after the test."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    before = _state()
    yield
    monkeypatch.undo()
    left = _left(before)
    deadline = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < deadline:
        # Children that were told to end need a moment; waiting for them is not a sleep in a test.
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout=0.1)
        left = _left(before)
    assert not left, f"{request.node.nodeid} left behind: {'; '.join(left)}"


def _state() -> tuple[set[int | None], set[int], dict[str, str]]:
    threads = {thread.ident for thread in threading.enumerate()}
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    variables = {k: v for k, v in os.environ.items() if k.startswith(OURS)}
    return threads, children, variables


def _left(before: tuple[set[int | None], set[int], dict[str, str]]) -> list[str]:
    threads, children, variables = before
    left = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread.ident not in threads and not thread.daemon
    ]
    for child in psutil.Process().children(recursive=True):
        if child.pid in children:
            continue
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                left.append(f"process {child.pid} {' '.join(child.cmdline()[:6])}")
        except psutil.NoSuchProcess:
            continue
    now = {k: v for k, v in os.environ.items() if k.startswith(OURS)}
    if now != variables:
        left.append(f"environment {sorted(now.items() ^ variables.items())}")
    return left


@pytest.fixture(scope="session", autouse=True)
def no_open_context() -> Iterator[None]:
    """At the end of the session no ZeroMQ context of a test is open."""
    yield
    gc.collect()
    contexts = [found for found in gc.get_objects() if type(found) is zmq.Context]
    open_ones = [context for context in contexts if not context.closed]
    assert not open_ones, f"{len(open_ones)} ZeroMQ contexts are open"
