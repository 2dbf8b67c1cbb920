"""The in-process side of mpwatch: `from mpwatch_agent import watch`.

Importing this package imports nothing else: a script that never trains pays for nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpwatch_agent.watching import Watch, watch

__all__ = ["Watch", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mpwatch_agent import watching

        return getattr(watching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
