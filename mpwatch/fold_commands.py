"""How commands fold: from the request, over the answers of the ranks, to the one outcome.

Pure, part of `mpwatch.fold`. A command has its outcome when every rank that still runs has
answered: applied if all of them applied it, else refused with the first reason.
"""

from typing import Final

from mpwatch.codec import HUB_RANK, Frame
from mpwatch.events import CommandApplied, CommandRefused, CommandRequested
from mpwatch.fold_state import Answer, CommandState, FoldState
from mpwatch.vocabulary import clean_text

MAX_COMMANDS: Final = 1000


def requested(state: FoldState, frame: Frame, event: CommandRequested) -> None:
    """The hub took a command."""
    command = _command(state, event.id, event.command)
    command.by = clean_text(event.by, 50)
    command.args = dict(event.arguments)


def applied(state: FoldState, frame: Frame, event: CommandApplied) -> None:
    """One rank applied a command."""
    answer = Answer(event.step, None, clean_text(event.note))
    _answered(state, frame.rank, _command(state, event.id, event.command), answer)


def refused(state: FoldState, frame: Frame, event: CommandRefused) -> None:
    """One rank refused a command, or the hub did for ranks that cannot answer any more."""
    answer = Answer(event.step, clean_text(event.reason))
    _answered(state, frame.rank, _command(state, event.id, event.command), answer)


def settle(state: FoldState) -> None:
    """Ranks have gone: who has answered decides."""
    for command in state.commands.values():
        _settle(state, command)


def _command(state: FoldState, id: str, name: str) -> CommandState:
    command = state.commands.get(id)
    if command is None:
        command = state.commands[id] = CommandState(id, clean_text(name, 100))
        if len(state.commands) > MAX_COMMANDS:
            del state.commands[next(iter(state.commands))]
    return command


def _answered(state: FoldState, rank: int, command: CommandState, answer: Answer) -> None:
    if command.outcome is not None:
        return  # a repeated id is answered again by the agent; the first answer stands
    command.answers.setdefault(rank, answer)
    if rank == HUB_RANK:
        _decide(command)
    else:
        _settle(state, command)


def _settle(state: FoldState, command: CommandState) -> None:
    if command.outcome is not None or not command.answers:
        return
    running = (
        rank.rank for rank in state.ranks.values() if rank.bound_at is not None and not rank.exited
    )
    if all(rank in command.answers for rank in running):
        _decide(command)


def _decide(command: CommandState) -> None:
    reasons = [answer.reason for answer in command.answers.values() if answer.reason is not None]
    steps = [answer.step for answer in command.answers.values() if answer.step is not None]
    command.outcome = "refused" if reasons else "applied"
    # What an agent says of a command that it applied is as good to know as why not.
    notes = [answer.note for answer in command.answers.values() if answer.note]
    command.reason = next(iter([*reasons, *notes]), None)
    command.step = max(steps) if steps else None
