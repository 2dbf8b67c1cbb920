"""The folded state of a run (placeholder shape; see RunView)."""

import msgspec


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `show` prints that comes from events."""

    steps: int = 0
