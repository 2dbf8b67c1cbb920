"""A plot over steps as rows of text: title, line, axis, and marks where something happened. Pure.

Drawn from the record's roll-ups, so a million steps cost what a thousand do.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from mpwatch.queries import StepPoint
from mpwatch_tui import figures
from mpwatch_tui.canvas import Canvas
from mpwatch_tui.looks import Looks, Row

LABEL_WIDTH: Final = 8


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What a plot shows. `stepped`: the value holds until it changes, as a loss scale does."""

    title: str
    role: str
    value: Callable[[StepPoint], float | None]
    label: Callable[[float | None], str] = figures.number
    logarithmic: bool = False
    stepped: bool = False


KINDS: Final = {
    "loss": Kind(title="loss", role="loss", value=lambda p: _mean_loss(p)),
    "scale": Kind(
        title="loss scale",
        role="scale",
        value=lambda point: point.loss_scale_last,
        label=figures.scale,
        logarithmic=True,
        stepped=True,
    ),
    "norm": Kind(title="gradient norm", role="norm", value=lambda point: point.grad_norm_max),
    "seconds": Kind(
        title="time per step",
        role="seconds",
        value=lambda point: point.duration_s,
        label=figures.seconds,
    ),
}


def _mean_loss(point: StepPoint) -> float | None:
    """The mean, or what is not finite where no loss of the point is."""
    return point.loss_max if point.loss_mean is None else point.loss_mean


def known(kind: Kind, points: Sequence[StepPoint]) -> bool:
    """Whether there is anything to draw."""
    return any(kind.value(point) is not None for point in points)


def chart(
    kind: Kind, points: Sequence[StepPoint], width: int, height: int, looks: Looks
) -> list[Row]:
    """The plot in exactly `height` rows of `width` cells."""
    values = [(p, v) for p in points if (v := kind.value(p)) is not None]
    finite = [value for _, value in values if math.isfinite(value)]
    newest = f" {kind.label(values[-1][1])}" if values else ""
    rows: list[Row] = [title(kind.title + newest, width, looks, kind.role)]
    columns, lines = width - LABEL_WIDTH - 1, height - 3
    if columns < 4 or lines < 1:
        return rows[:height]
    if not finite:
        what = "nothing yet" if not values else f"only {kind.label(values[-1][1])}"
        rows.append((("".rjust(LABEL_WIDTH + 1) + what, "dim"),))
        return _padded(rows, height)
    low, high = _range(finite, kind)
    first, last = points[0].first_step, _end(points[-1])
    canvas = Canvas(columns, lines, looks.ascii)
    for stretch in _stretches(values):
        places = [
            (_across(p, first, last, canvas.width), _up(v, low, high, kind, canvas.height))
            for p, v in stretch
        ]
        _draw(places, kind, canvas)
    rows.append(_marks(points, first, last, columns, looks))
    labels = {0: kind.label(high), lines - 1: kind.label(low)} if lines > 1 else {0: newest}
    for index, text in enumerate(canvas.rows()):
        label = labels.get(index, "")[:LABEL_WIDTH].rjust(LABEL_WIDTH)
        rows.append(((label + " ", "dim"), (text, kind.role)))
    rows.append(_axis(first, last, columns))
    return _padded(rows, height)


def title(text: str, width: int, looks: Looks, role: str = "title") -> Row:
    """A panel's first row."""
    shown = f" {text} "[: max(0, width - 2)]
    rest = looks.rule * max(0, width - 1 - len(shown))
    return ((looks.rule, "title"), (shown, role), (rest, "title"))


def _padded(rows: list[Row], height: int) -> list[Row]:
    return (rows + [()] * height)[:height]


def _stretches(values: Sequence[tuple[StepPoint, float]]) -> list[list[tuple[StepPoint, float]]]:
    """The values without those that are not finite; nothing is drawn across such a hole."""
    stretches: list[list[tuple[StepPoint, float]]] = [[]]
    for point, value in values:
        if math.isfinite(value):
            stretches[-1].append((point, value))
        else:
            stretches.append([])
    return stretches


def _end(point: StepPoint) -> int:
    return point.first_step + max(point.count, 1) - 1


def _range(values: Sequence[float], kind: Kind) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low < high:
        return low, high
    if kind.logarithmic:
        return low / 2, high * 2
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def _across(point: StepPoint, first: int, last: int, width: int) -> int:
    """The column of a point: the middle of its steps."""
    middle = (point.first_step + _end(point)) / 2
    return round((middle - first) / max(1, last - first) * (width - 1))


def _up(value: float, low: float, high: float, kind: Kind, height: int) -> int:
    """The height of a value above the lowest row."""
    if kind.logarithmic and low > 0:
        part = math.log2(value / low) / math.log2(high / low)
    else:
        # Halved first: the range of two doubles need not be one.
        part = (value / 2 - low / 2) / (high / 2 - low / 2)
    return round(part * (height - 1))


def _draw(places: Sequence[tuple[int, int]], kind: Kind, canvas: Canvas) -> None:
    for place in places[:1]:
        canvas.dot(*place)
    for (x0, y0), (x1, y1) in pairwise(places):
        if kind.stepped:
            canvas.line(x0, y0, x1, y0)
            canvas.line(x1, y0, x1, y1)
        else:
            canvas.line(x0, y0, x1, y1)


def _marks(points: Sequence[StepPoint], first: int, last: int, columns: int, looks: Looks) -> Row:
    """A mark in each column with a skipped step, `!` where a loss was not finite."""
    marks = [" "] * columns
    for point in points:
        column = _across(point, first, last, columns)
        losses = (point.loss_min, point.loss_max)
        if any(loss is not None and not math.isfinite(loss) for loss in losses):
            marks[column] = "!"
        elif point.skipped and marks[column] == " ":
            marks[column] = looks.mark
    text = "".join(marks)
    bad = "!" in text
    return ((" " * (LABEL_WIDTH + 1), "dim"), (text, "bad" if bad else "warn"))


def _axis(first: int, last: int, columns: int) -> Row:
    left, right = f"step {first}", str(last)
    space = columns - len(left) - len(right)
    text = f"{left}{' ' * space}{right}" if space > 0 else right.rjust(columns)[-columns:]
    return ((" " * (LABEL_WIDTH + 1) + text, "dim"),)
