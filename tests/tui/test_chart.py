"""Plots as literal text: what stands in which cell."""

import math

import pytest

from mpwatch.queries import StepPoint
from mpwatch_tui.chart import KINDS, chart
from mpwatch_tui.looks import Looks

ASCII = Looks(ascii=True)


def point(step: int, loss: float | None, **fields: object) -> StepPoint:
    given = {
        "first_step": step,
        "count": 1,
        "skipped": 0,
        "loss_min": loss,
        "loss_mean": loss if loss is None or math.isfinite(loss) else None,
        "loss_max": loss,
        "loss_scale_min": None,
        "loss_scale_last": None,
        "grad_norm_max": None,
        "duration_s": None,
        "time": 0.0,
        **fields,
    }
    return StepPoint(**given)  # type: ignore[arg-type]


def text(kind: str, points: list[StepPoint], width: int, height: int, looks: Looks) -> list[str]:
    rows = chart(KINDS[kind], points, width, height, looks)
    return ["".join(piece for piece, _ in row).rstrip() for row in rows]


def test_a_falling_loss_falls_from_left_to_right() -> None:
    points = [point(step, 10.0 - step) for step in range(1, 9)]
    assert text("loss", points, 17, 11, ASCII) == [
        "- loss 2 --------",
        "",
        "       9 *",
        "          *",
        "           *",
        "            *",
        "             *",
        "              *",
        "               *",
        "       2        *",
        "         step 1 8",
    ]


def test_braille_has_eight_dots_a_cell() -> None:
    points = [point(step, float(step)) for step in range(1, 9)]
    assert text("loss", points, 13, 5, Looks()) == [
        "\u2500 loss 8 " + "\u2500" * 4,
        "",
        "       8   \u2860\u280a",
        "       1 \u2860\u280a",
        "            8",
    ]


def test_a_loss_scale_holds_until_it_halves_and_skipped_steps_are_marked() -> None:
    scales = [64.0, 64.0, 64.0, 32.0, 32.0, 16.0, 16.0, 16.0]
    points = [
        point(step, 1.0, loss_scale_last=scale, skipped=int(step in (4, 6)))
        for step, scale in enumerate(scales, start=1)
    ]
    assert text("scale", points, 17, 6, ASCII) == [
        "- loss scale 16 -",
        "            v v",
        "      64 ****",
        "            ***",
        "      16      ***",
        "         step 1 8",
    ]


def test_what_is_not_finite_is_said_and_leaves_the_rest_drawn() -> None:
    points = [point(1, 3.0), point(2, math.nan), point(3, math.inf), point(4, 1.0)]
    assert text("loss", points, 17, 6, ASCII) == [
        "- loss 1 --------",
        "           !  !",
        "       3 *",
        "",
        "       1        *",
        "         step 1 4",
    ]
    only = text("loss", [point(1, math.nan)], 30, 6, ASCII)
    assert only[1] == "         only nan"


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 2), (12, 3), (13, 4), (60, 2)])
def test_any_room_is_kept_within(width: int, height: int) -> None:
    points = [point(step, float(step)) for step in range(1, 500)]
    rows = chart(KINDS["loss"], points, width, height, Looks())
    assert len(rows) <= height
    assert all(sum(len(piece) for piece, _ in row) <= width for row in rows)


def test_one_point_and_equal_values_have_a_place() -> None:
    assert "*" in "".join(text("loss", [point(1, 2.0)], 20, 7, ASCII))
    level = text("loss", [point(s, 2.0) for s in range(1, 5)], 20, 8, ASCII)
    assert level[2].split() == ["2.2"]
    assert level[-2].split() == ["1.8"]
    assert sum("*" in row for row in level) == 1


def test_a_million_steps_are_drawn_from_their_roll_ups() -> None:
    points = [point(1 + 5000 * i, 1.0 / (i + 1), count=5000) for i in range(200)]
    rows = text("loss", points, 60, 10, ASCII)
    assert rows[-1].split() == ["step", "1", "1000000"]


def test_extreme_values_do_not_break_the_scale() -> None:
    points = [point(1, -1.7e308), point(2, 1.7e308), point(3, 0.0)]
    assert len(text("loss", points, 40, 8, ASCII)) == 8
