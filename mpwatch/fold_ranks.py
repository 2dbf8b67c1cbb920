"""How the life of ranks folds: bound, found, paused, failing, stopping, gone.

Functions over the fold's state, called by `mpwatch.fold`. Text from the script is cleaned here.
"""

from typing import Final

import msgspec

from mpwatch import events, fold_commands
from mpwatch.codec import Frame
from mpwatch.fold_jobs import attempt_of
from mpwatch.fold_state import MAX_ENTRIES, MAX_OPTIMIZERS, FoldState, append, rank_of
from mpwatch.fold_steps import LEAD_RANK
from mpwatch.store import FaultSeen, HookSeen
from mpwatch.vocabulary import clean_text

MAX_NAMES: Final = 32


def agent_bound(state: FoldState, frame: Frame, event: events.AgentBound) -> None:
    """A process took its rank."""
    rank = rank_of(state, frame)
    if rank.pid is not None:  # another process of the same rank and attempt
        rank.dropped_before, rank.dropped = rank.dropped_before + rank.dropped, 0
        rank.exited, rank.error_type, rank.error = False, None, None
    rank.paused = False
    rank.pid, rank.process_start_time = event.pid, event.process_start_time
    rank.process, rank.bound_at = event.process, frame.time
    rank.host = clean_text(event.host, 200)
    if frame.rank == LEAD_RANK:
        state.torch_version = clean_text(event.torch_version, 100)
        state.python_version = clean_text(event.python_version, 100)
        state.threads, state.world_size = event.threads, event.world_size
        state.stopping = None
    attempt_of(state, frame)


def loop_found(state: FoldState, frame: Frame, event: events.LoopFound) -> None:
    """What the agent found of the loop."""
    if frame.rank != LEAD_RANK:
        return
    state.described = tuple(
        msgspec.structs.replace(each, name=clean_text(each.name, 200))
        for each in event.optimizers[:MAX_OPTIMIZERS]
    )
    state.roots = tuple(clean_text(root, 200) for root in event.roots[:MAX_NAMES])
    state.notes = tuple(clean_text(note) for note in event.notes[:MAX_NAMES])
    state.device = clean_text(event.device, 100)
    state.scaler = None if event.scaler is None else clean_text(event.scaler, 100)
    state.compiled = event.compiled


def hook_disabled(state: FoldState, frame: Frame, event: events.HookDisabled) -> None:
    """A hook switched itself off."""
    seen = HookSeen(
        hook=clean_text(event.hook, 200), error=clean_text(event.error), rank=frame.rank
    )
    append(state.hooks_disabled, seen, MAX_ENTRIES)


def events_dropped(state: FoldState, frame: Frame, event: events.EventsDropped) -> None:
    """An outbox was full."""
    rank = rank_of(state, frame)
    rank.dropped = max(rank.dropped, event.total)


def paused(state: FoldState, frame: Frame, event: events.TrainingPaused) -> None:
    """The loop waits."""
    rank = rank_of(state, frame)
    rank.paused, rank.paused_at = True, event.step


def unpaused(state: FoldState, frame: Frame, event: events.TrainingUnpaused) -> None:
    """The loop goes on."""
    rank_of(state, frame).paused = False


def fault_injected(state: FoldState, frame: Frame, event: events.FaultInjected) -> None:
    """A fault that was asked for."""
    seen = FaultSeen(
        fault=clean_text(event.fault, 50),
        step=event.step,
        rank=frame.rank,
        micro_batch=event.micro_batch,
        target=clean_text(event.target, 200),
    )
    append(state.faults, seen, MAX_ENTRIES)


def agent_stopping(state: FoldState, frame: Frame, event: events.AgentStopping) -> None:
    """The script is being ended."""
    if frame.rank == LEAD_RANK:
        state.stopping = clean_text(event.reason, 100)


def agent_exited(state: FoldState, frame: Frame, event: events.AgentExited) -> None:
    """The interpreter is ending."""
    rank = rank_of(state, frame)
    rank.exited, rank.paused = True, False
    if frame.rank == LEAD_RANK:
        state.windows_dropped = event.windows_dropped
    rank.error_type = None if event.error_type is None else clean_text(event.error_type, 200)
    rank.error = None if event.error is None else clean_text(event.error)
    fold_commands.settle(state)
