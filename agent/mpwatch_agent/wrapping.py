"""What every wrapper around a function of torch has in common."""

import functools
from collections.abc import Callable
from typing import Any

from mpwatch_agent.shield import invisible_to_dynamo

Wrap = Callable[[Any], Any]


def wrapper(original: Any) -> Callable[[Any], Any]:
    """Decorate a wrapper so that it looks like `original` and Dynamo leaves its frame alone."""

    def decorate(function: Any) -> Any:
        return invisible_to_dynamo(functools.wraps(original)(function))

    return decorate
