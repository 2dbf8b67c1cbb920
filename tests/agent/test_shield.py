"""What the shield lets through, and what it keeps from the loop."""

import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from mpwatch_agent.shield import Gate, Shield


class Timeout(Exception):
    """What a script's own handler raises."""


def plain(number: int, frame: Any) -> None:
    raise Timeout


def resets(number: int, frame: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    raise Timeout


def with_word(word: str, number: int, frame: Any) -> None:
    raise Timeout(word)


def anything(*given: Any) -> None:
    raise Timeout


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        raise Timeout


def busy(delay_s: float) -> None:
    # The timer is set in here: on a crowded machine it may run out before anything else begins.
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    for _ in range(1_000_000):
        len(list(range(3)))


@pytest.mark.parametrize(
    "handler",
    [plain, resets, functools.partial(with_word, "partial"), anything, Handler()],
    ids=["plain", "resets itself", "partial", "any arguments", "object"],
)
def test_what_a_signal_handler_raises_is_the_scripts(handler: Callable[..., None]) -> None:
    failed: list[tuple[str, str]] = []
    guarded = Shield(Gate(), lambda *said: failed.append(said)).guard("busy", busy)
    before = signal.getsignal(signal.SIGALRM)
    try:
        for turn in range(10):
            signal.signal(signal.SIGALRM, handler)
            with pytest.raises(Timeout):
                guarded(0.001 + 0.0003 * turn)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert failed == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_pass(error: type[BaseException]) -> None:
    def raises() -> None:
        raise error

    guarded = Shield(Gate(), lambda *said: None).guard("raises", raises)
    with pytest.raises(error):
        guarded()


def test_a_failure_is_kept_said_once_and_ends_the_hook() -> None:
    calls: list[int] = []
    failed: list[tuple[str, str]] = []

    def fails(argument: int) -> int:
        calls.append(argument)
        raise ValueError(f"bad {argument}")

    guarded = Shield(Gate(), lambda *said: failed.append(said)).guard("fails", fails)
    assert [guarded(1), guarded(2)] == [None, None]
    assert calls == [1]
    assert failed == [("fails", "ValueError: bad 1")]
