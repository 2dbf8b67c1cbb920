"""How the hub's own events fold: attempts of the job, silence, samples, gaps.

Functions over the fold's state, called by `mpwatch.fold`.
"""

import msgspec

from mpwatch import events, fold_commands
from mpwatch.codec import Frame
from mpwatch.fold_state import MAX_ENTRIES, FoldState, append
from mpwatch.store import AttemptSeen
from mpwatch.vocabulary import clean_text


def attempt_of(state: FoldState, frame: Frame) -> int:
    """The place of the frame's attempt in the list; made where it is new."""
    attempts = state.attempts
    for index in range(len(attempts) - 1, -1, -1):
        if attempts[index].n == frame.attempt:
            return index
    append(
        attempts,
        AttemptSeen(
            n=frame.attempt,
            started_at=frame.time,
            pid=None,
            process_start_time=None,
            ended_at=None,
            exit_code=None,
            signal=None,
            cause=None,
        ),
        MAX_ENTRIES,
    )
    return len(attempts) - 1


def job_started(state: FoldState, frame: Frame, event: events.JobStarted) -> None:
    """The keeper spawned the script."""
    index = attempt_of(state, frame)
    state.attempts[index] = msgspec.structs.replace(
        state.attempts[index],
        started_at=frame.time,
        pid=event.pid,
        process_start_time=event.process_start_time,
    )


def job_exited(state: FoldState, frame: Frame, event: events.JobExited) -> None:
    """The keeper's child ended."""
    index = attempt_of(state, frame)
    state.attempts[index] = msgspec.structs.replace(
        state.attempts[index],
        ended_at=frame.time,
        exit_code=event.exit_code,
        signal=event.signal,
        cause=clean_text(event.cause) or None,
    )
    state.silent_s = None
    for rank in state.ranks.values():
        if rank.attempt <= frame.attempt:
            rank.exited, rank.paused = True, False
    fold_commands.settle(state)


def hub_started(state: FoldState, frame: Frame, event: events.HubStarted) -> None:
    """A hub took over."""
    state.hubs += 1


def job_stalled(state: FoldState, frame: Frame, event: events.JobStalled) -> None:
    """No event came for long."""
    state.silent_s = event.silent_s


def job_recovered(state: FoldState, frame: Frame, event: events.JobRecovered) -> None:
    """Events come again."""
    state.silent_s = None


def system_sampled(state: FoldState, frame: Frame, event: events.SystemSampled) -> None:
    """The newest sample of the machine."""
    state.system = event


def frames_missing(state: FoldState, frame: Frame, event: events.FramesMissing) -> None:
    """A gap in a rank's frames."""
    state.missing_frames += event.count


def output_line(state: FoldState, frame: Frame, event: events.OutputLine) -> None:
    """A line of the script's output; a successor of this hub goes on behind it."""
    if not event.unfinished and event.number >= state.output_lines:
        state.output_lines = event.number + 1
        state.output_offset = event.offset
