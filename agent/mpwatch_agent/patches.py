"""The table of everything replaced in torch, so that all of it can be put back.

Names, originals and wrappers stand in one place; `hooks` fills it, `agent` empties it.
"""

from collections.abc import Callable
from typing import Any

# Stands for an original that is inherited.
_INHERITED = object()


class PatchTable:
    """What was replaced where. Every replacement keeps the original's name and docstring."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace `owner.name` by `make(original)`; False when this torch has no such name."""
        original = vars(owner).get(name)
        if original is None:
            return False
        is_static = isinstance(original, staticmethod)
        wrapper = make(original.__func__ if is_static else original)
        installed = staticmethod(wrapper) if is_static else wrapper
        setattr(owner, name, installed)
        self._entries.append((owner, name, original, installed))
        return True

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` an attribute that it only inherits so far."""
        self._entries.append((owner, name, _INHERITED, value))
        setattr(owner, name, value)

    def put(self, owner: Any, name: str, wrapper: Any) -> None:
        """Put an existing wrapper at a second name (a function that two modules export)."""
        self._entries.append((owner, name, vars(owner)[name], wrapper))
        setattr(owner, name, wrapper)

    def names(self) -> list[str]:
        """The replaced names, for reports and tests."""
        return [f"{getattr(o, '__name__', o)}.{name}" for o, name, _, _ in self._entries]

    def restore(self) -> None:
        """Put every original back, unless somebody replaced our wrapper since."""
        for owner, name, original, installed in reversed(self._entries):
            if vars(owner).get(name) is not installed:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._entries.clear()
