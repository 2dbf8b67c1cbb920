"""Scales and losses of the leader's last windows, for verdicts to come.

A window whose numbers are still on their way from a device counts once they have arrived. Fed by
`locating` at each step; reads nothing itself.
"""

from collections import deque
from collections.abc import Callable

from mpwatch_agent.device import settle
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.tracks import MicroBatch

# Losses of so many windows are remembered, and so many scales.
LOSSES, SCALES = 20, 1000


class WindowHistory:
    """`losses` are finite means; `heard_late(step)` is told of a loss that turned out not to be."""

    def __init__(self, heard_late: Callable[[int], None]) -> None:
        self.losses: deque[float] = deque(maxlen=LOSSES)
        self._clean: deque[float | None] = deque(maxlen=SCALES)
        self._waiting: deque[tuple[StepDraft, bool]] = deque()
        self._heard_late = heard_late

    def remember(self, draft: StepDraft, overflowed: bool) -> None:
        """A step of the leader is over."""
        if draft.mark is None:
            self._keep(draft, overflowed)
            return
        self._waiting.append((draft, overflowed))
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Take in what has arrived; `wait` for the rest where an overflow needs it."""
        while self._waiting and (wait or self._waiting[0][0].ready()):
            draft, overflowed = self._waiting.popleft()
            if wait:
                draft.mark.synchronize()
            self._keep(draft, overflowed or bool(settle(draft.found_inf)))
            if not overflowed and any(is_bad(micro) for micro in draft.window):
                self._heard_late(draft.step)

    def clean_at(self, scale: float | None) -> int:
        """Windows in a row, up to now, that were clean at `scale` or a higher one."""
        count = 0
        for earlier in reversed(self._clean):
            if scale is not None and (earlier is None or earlier < scale):
                break
            count += 1
        return count

    def _keep(self, draft: StepDraft, overflowed: bool) -> None:
        if overflowed:
            self._clean.clear()
        else:
            self._clean.append(settle(draft.scale_before))
        total, known = 0.0, 0
        for micro in draft.window:
            loss = settle(micro.losses[-1]) if micro.losses else None
            if loss is None or loss - loss != 0.0:
                return
            total += loss
            known += 1
        if known:
            self.losses.append(total / known)


def is_bad(micro: MicroBatch) -> bool:
    """Whether a loss of `micro` was not finite; only where its readings have arrived."""
    # A finite number minus itself is 0.0.
    return any(loss is not None and loss - loss != 0.0 for loss in map(settle, micro.losses))


def is_late(micro: MicroBatch) -> bool:
    """Whether a loss of `micro` was not known when its backward began."""
    return any(type(loss) is not float for loss in micro.losses)
