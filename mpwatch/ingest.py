"""Which frames of an agent are taken: of this run, in order, with numbers that can be stored.

Pure: the hub asks before it records. What is refused has a category that the hub counts.
"""

import math
from typing import Final

from mpwatch.codec import Frame
from mpwatch.errors import CodecError
from mpwatch.events import (
    AgentBound,
    CommandApplied,
    CommandRefused,
    CommandRequested,
    Event,
    FramesMissing,
    HubStarted,
    JobExited,
    JobRecovered,
    JobStalled,
    JobStarted,
    OutputLine,
    StepFinished,
    SystemSampled,
)
from mpwatch.fold_state import MAX_OPTIMIZERS, FoldState, RankState

MAX_RANK: Final = 65_535
MAX_RANKS_SEEN: Final = 4096
MAX_ATTEMPT: Final = 1_000_000
# SQLite's integers and IEEE doubles both hold it.
MAX_COUNT: Final = 2**53
MAX_PID: Final = 2**31
MAX_ID: Final = 100

# What only a hub may say: no agent ends a job or hands in a command.
_OF_THE_HUB: Final = frozenset(
    {
        CommandRequested,
        FramesMissing,
        HubStarted,
        JobExited,
        JobRecovered,
        JobStalled,
        JobStarted,
        OutputLine,
        SystemSampled,
    }
)


def check_frame(frame: Frame, run: str, state: FoldState) -> None:
    """Refuse envelopes that this hub cannot use.

    Raises:
        CodecError: "foreign" for another run, "malformed" for numbers out of range.
    """
    if frame.run != run:
        raise CodecError("foreign", f"frame of run {frame.run[:80]!r}")
    in_range = (
        0 <= frame.rank <= MAX_RANK
        and 0 <= frame.attempt <= MAX_ATTEMPT
        and 0 <= frame.sequence <= MAX_COUNT
        and math.isfinite(frame.time)
    )
    if not in_range:
        raise CodecError("malformed", "rank, attempt, sequence or time out of range")
    if frame.rank not in state.ranks and len(state.ranks) >= MAX_RANKS_SEEN:
        raise CodecError("malformed", f"more than {MAX_RANKS_SEEN} ranks")


def check_event(event: Event) -> None:
    """Refuse numbers that neither the record nor a sum can hold.

    Raises:
        CodecError: "malformed".
    """
    kind = type(event)
    if kind in _OF_THE_HUB:
        raise CodecError("malformed", f"{kind.__name__} is for the hub to say")
    if isinstance(event, AgentBound) and not 0 < event.pid < MAX_PID:
        raise CodecError("malformed", f"process id {event.pid}")
    if isinstance(event, CommandApplied | CommandRefused) and len(event.id) > MAX_ID:
        raise CodecError("malformed", "command id too long")
    if isinstance(event, StepFinished):
        _check_step(event)


def _check_step(event: StepFinished) -> None:
    # Written out: this runs for every step.
    good = (
        1 <= event.step <= MAX_COUNT
        and 0 <= event.optimizer < MAX_OPTIMIZERS
        and 0 <= event.micro_batches <= MAX_COUNT
        and 0 <= event.script_window <= MAX_COUNT
        and 0 <= event.multiplier <= MAX_COUNT
        and (event.samples is None or 0 <= event.samples <= MAX_COUNT)
        and (event.tokens is None or 0 <= event.tokens <= MAX_COUNT)
    )
    if not good:
        raise CodecError("malformed", "a count of step_finished is out of range")


def missing_before(frame: Frame, event: Event | None, known: RankState | None) -> int:
    """How many frames of its rank never arrived before `frame`.

    Raises:
        CodecError: "duplicate" for a frame that came already or comes too late.
    """
    # A process that took the rank over leaves a gap on purpose: its predecessor may have sent
    # more than it could note down.
    took_over = isinstance(event, AgentBound) and event.process > 0
    if known is None or frame.attempt > known.attempt:
        return 0 if took_over else frame.sequence
    if frame.attempt < known.attempt:
        raise CodecError("duplicate", "frame of an earlier attempt")
    if frame.sequence > known.sequence:
        return 0 if took_over else frame.sequence - known.sequence - 1
    if _begins_anew(frame, event, known):
        return frame.sequence
    raise CodecError("duplicate", f"frame {frame.sequence} came already")


def _begins_anew(frame: Frame, event: Event | None, known: RankState) -> bool:
    """Whether another process of the same rank and attempt counts from the start again.

    Its frames are newer than all of its predecessor's; a repeated or late frame is not.
    """
    if isinstance(event, AgentBound):
        mine = (known.pid, known.process_start_time, known.process)
        return (event.pid, event.process_start_time, event.process) != mine
    return frame.time > known.time
