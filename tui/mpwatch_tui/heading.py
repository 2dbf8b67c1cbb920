"""The header and the footer as rows of text: what matters most stays when there is little room."""

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len

from mpwatch_tui import figures
from mpwatch_tui.looks import Looks, Piece, Row
from mpwatch_tui.picture import Asked, Picture

_STATE_ROLES: Final = {
    "running": "good",
    "finished": "good",
    "starting": "warn",
    "paused": "warn",
    "stalled": "warn",
    "stopped": "warn",
    "preempted": "warn",
}
SEPARATION: Final = "  "
# How long the outcome of a command stays in the footer; the log keeps it.
TOLD_S: Final = 30.0


def header_rows(picture: Picture, width: int, height: int, looks: Looks) -> list[Row]:
    """The header in `height` rows; what does not fit is left out, the least important first."""
    numbers, details = _speed(picture, looks), _health(picture)
    if height < 3:
        who, window = _who(picture, looks), _window(picture, looks)
        rows = [[*who[:3], *window, *who[3:]], [*numbers[:2], *details, *numbers[2:]]]
        return [_row(group, width) for group in rows]
    return [_row(group, width) for group in (_who(picture, looks), numbers, details)]


def _who(picture: Picture, looks: Looks) -> list[Row]:
    facts = picture.facts
    role = _STATE_ROLES.get(facts.state, "bad")
    named = looks.text(facts.name or facts.run_id, 40)
    groups: list[Row] = [
        ((f"{looks.lamp} {facts.state}", role),),
        ((named, "strong"),),
    ]
    if facts.exit_code is not None and not facts.is_live:
        groups.append(((f"exit code {facts.exit_code}", role),))
    if facts.started_at is not None:
        # Of a job whose end nobody saw, what was seen last is the end.
        last = facts.ended_at or picture.view.last_event_time or picture.now
        end = picture.now if facts.is_live else last
        groups.append(((figures.elapsed(end - facts.started_at), "plain"),))
    if facts.attempt > 1 or not facts.name:
        groups.append(_pair("attempt", str(facts.attempt)))
    else:
        groups += [_pair("attempt", str(facts.attempt)), ((looks.text(facts.run_id, 60), "dim"),)]
    if facts.cause and not facts.is_live:
        groups.append(((looks.text(facts.cause, 120), "dim"),))
    return groups


def _speed(picture: Picture, looks: Looks) -> list[Row]:
    """Rates speak of the newest steps: of a job that stands still they are the past."""
    view = picture.view
    now = picture.facts.state == "running"
    role = "plain" if now else "dim"
    groups = [_pair("step", str(view.steps))]
    if view.step_s:
        groups.append(((figures.rate(1 / view.step_s), role), (" steps/s", "dim")))
    if view.samples_per_s is not None:
        groups.append(((figures.rate(view.samples_per_s), role), (" samples/s", "dim")))
    groups += _window(picture, looks)
    if view.world_size > 1:
        groups.append(_pair("ranks", str(view.world_size)))
    return groups


def _window(picture: Picture, looks: Looks) -> list[Row]:
    view = picture.view
    if view.accumulation_steps is None:
        return []
    words = str(view.accumulation_steps)
    if view.multiplier not in (None, 1):
        words = f"{view.script_window}{looks.times}{view.multiplier}={words}"
    return [_pair("accum", words)]


def _health(picture: Picture) -> list[Row]:
    view = picture.view
    groups = [_pair("loss", figures.number(view.loss))]
    if view.loss_scale is not None:
        groups.append(_pair("scale", figures.scale(view.loss_scale)))
    groups.append((("skipped ", "dim"), (str(view.skipped), "warn" if view.skipped else "plain")))
    groups.append(_pair("applied", str(view.applied)))
    if view.grad_norm is not None:
        groups.append(_pair("norm", figures.number(view.grad_norm)))
    if view.learning_rates:
        groups.append(_pair("lr", figures.number(view.learning_rates[0])))
    if view.superseded:
        groups.append(_pair("superseded", str(view.superseded)))
    return groups


def _pair(name: str, value: str) -> Row:
    return ((f"{name} ", "dim"), (value, "plain"))


def _row(groups: Sequence[Row], width: int) -> Row:
    """As many groups from the front as fit into `width`."""
    row: list[Piece] = []
    used = 1
    for group in groups:
        size = sum(cell_len(text) for text, _ in group)
        if row and used + len(SEPARATION) + size > width:
            continue
        row += [(SEPARATION if row else " ", "plain"), *group]
        used += size + (len(SEPARATION) if used > 1 else 0)
    return tuple(row)


def footer_row(picture: Picture, keys: Sequence[tuple[str, str]], width: int, looks: Looks) -> Row:
    """Connection and the newest command on the left; keys as far as there is room."""
    pieces: list[Piece] = list(_connection(picture, looks))
    asked = picture.asked
    if asked is not None and (asked.outcome == "pending" or picture.now - asked.at < TOLD_S):
        pieces += [(SEPARATION, "plain"), *_asked(asked, looks)]
    used = sum(cell_len(text) for text, _ in pieces) + 1
    right: list[Piece] = []
    for key, does in keys:
        size = len(key) + len(does) + 3
        if used + size > width:
            break
        right += [(f"  {key}", "key"), (f" {does}", "dim")]
        used += size
    return ((" ", "plain"), *pieces, (" " * max(0, width - used), "plain"), *right)


def _connection(picture: Picture, looks: Looks) -> Row:
    if picture.trouble:
        return ((looks.text(picture.trouble, 200), "bad"),)
    waited = figures.elapsed(picture.now - picture.since)
    match picture.connection:
        case "live":
            return (("live", "good"),)
        case "connecting":
            return (("connecting", "warn"),)
        case "silent":
            return ((f"hub does not answer ({waited}); job goes on", "bad"),)
        case "apart":
            return ((f"{looks.text(picture.apart, 100)}; from the record", "event"),)
        case "lost" if not picture.view.cursor:
            return ((f"no hub ({waited}), see hub.log; job goes on", "bad"),)
        case "lost":
            return ((f"hub lost ({waited}), last picture; job goes on", "bad"),)
        case "over":
            ended = "the job runs: mpwatch attach" if picture.facts.is_live else "ended"
            return ((f"{ended}; from the record", "event"),)


def _asked(asked: Asked, looks: Looks) -> Row:
    role = {"pending": "warn", "applied": "good", "refused": "bad", "done": "good"}[asked.outcome]
    outcome = [] if asked.outcome == "done" else [asked.outcome]
    detail = [looks.text(asked.detail, 200)] if asked.detail else []
    return ((f"{asked.words}: {' '.join([*outcome, *detail])}", role),)
