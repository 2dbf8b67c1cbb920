"""What `show` says is what a newcomer needs: the first overflow, plain scales, typical costs."""

from pathlib import Path
from typing import Any

import pytest

from mpwatch import codec, events
from mpwatch.cli import formats, tail
from mpwatch.cli.gradients_table import gradients_text
from mpwatch.cli.summary import summary
from mpwatch.events import Event, FaultInjected
from mpwatch.fold_overflows import MAX_OVERFLOWS
from mpwatch.run_state import Evidence
from mpwatch.runs import Run
from mpwatch.store import RunView
from tests.core.test_fold_overflows import fold, located, skipped
from tests.support.hub_runs import frame, step


def shown(view: RunView) -> list[str]:
    """The text, as lines."""
    run = Run(Path("/runs/r"), "r", None, 0.0, {}, [], False)
    return summary(run, "running", Evidence(), view).splitlines()


def overflows(count: int, **first: Any) -> list[Event]:
    """`count` overflows, every third step; the first one is another one than the rest."""
    told: list[Event] = [skipped(3), located(3, parameter="first.weight", **first)]
    for number in range(2, count + 1):
        told += [skipped(number * 3), located(number * 3)]
    return told


def test_the_first_overflow_is_listed_whatever_came_after_it() -> None:
    lines = shown(fold(*overflows(MAX_OVERFLOWS + 50)))
    at = next(i for i, line in enumerate(lines) if line.startswith("overflows "))
    assert lines[at] == (
        "overflows    250, at steps 3, ... 239 more ..., "
        + ", ".join(str(number * 3) for number in range(241, 251))
    )
    assert lines[at + 1].startswith("             step 3, micro-batch 2: inf in first.weight")
    assert lines[at + 2] == "             ... 246 more ..."
    steps = [line.split(",")[0].strip() for line in lines[at + 3 : at + 6]]
    assert steps == ["step 744", "step 747", "step 750"]


def test_a_few_overflows_are_all_listed_and_nothing_is_left_out_between() -> None:
    text = "\n".join(shown(fold(*overflows(4))))
    assert "overflows    4, at steps 3, 6, 9, 12\n" in text
    assert "more" not in text
    assert text.count("step 3, micro-batch 2") == 1
    assert "overflows    1, at step 3\n" in "\n".join(shown(fold(*overflows(1))))


def test_a_first_overflow_that_nobody_located_is_said_to_be_so() -> None:
    told = [skipped(1), *overflows(8)]
    text = "\n".join(shown(fold(*told)))
    assert "             step 1: not located\n             ... 5 more ...\n" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (65536.0, "65536"),
        (2.0**20, "1048576"),
        (2.0**32, "2^32"),
        (0.25, "0.25"),
        (2.0**-14, "2^-14"),
        (1000.0, "1000"),
        (0.0, "0"),
        (3e-5, "3e-05"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (None, "-"),
    ],
)
def test_a_scale_reads_as_what_it_is(value: float | None, words: str) -> None:
    assert formats.scale(value) == words


def test_scales_are_plain_in_show() -> None:
    limit = events.ScaleLimitReached(limit="ceiling", scale=2.0**20, step=1)
    lines = shown(fold(limit, step(1, loss_scale_before=65536.0, loss_scale_after=2.0**17)))
    assert "loss scale   131072" in lines
    assert "             scale 1048576: ceiling at step 1" in lines
    layers = (events.LayerGradients(name="all", values=1, looked_at=1),)
    sampled = events.GradientsSampled(step=1, layers=layers, loss_scale=2.0**20)
    assert "; loss scale 1048576; " in gradients_text(sampled, None)


def test_scales_are_plain_in_tail() -> None:
    event = step(3, loss_scale_before=2.0**21, loss_scale_after=2.0**20, loss=1234567.0)
    line = tail._line((7, codec.decode_frame(frame(event, 0)), event))
    assert " loss_scale_before=2097152 loss_scale_after=1048576 " in line
    assert " loss=1.23457e+06 " in line


def test_the_agents_cost_is_the_typical_one_beside_the_mean() -> None:
    # A first step of 100 ms, then 100 us, of which 20 us on sampled things.
    told = [step(1, agent_s=0.1), *(step(n, agent_s=100e-6, sampled_s=20e-6) for n in range(2, 12))]
    view = fold(*told)
    assert view.agent_us_per_step == pytest.approx((0.1 + 10 * 100e-6) / 11 * 1e6)
    assert view.agent_us_per_step_median == pytest.approx(100.0, rel=0.006)
    (line,) = [line for line in shown(view) if line.startswith("agent ")]
    typical = float(line.split()[1])
    assert typical == pytest.approx(100.0, rel=0.006)
    assert line == (
        f"agent        {typical:.4g} us per step (median); mean 9182 us with the first steps in"
        " it, 18.18 us of it sampling"
    )


def test_work_that_falls_on_one_step_of_many_is_no_steps_own() -> None:
    """Steps are noted, and worked through about every 200 ms: at 10 ms a step, every twentieth."""
    costs = [2e-3 if n % 20 == 0 else 10e-6 for n in range(1, 401)]
    told = [step(1, agent_s=0.1), step(2, agent_s=0.05)]
    told += [step(n + 2, agent_s=cost, duration_s=0.01) for n, cost in enumerate(costs, 1)]
    # In a half second are two or three of them, of fifty steps.
    median = fold(*told).agent_us_per_step_median
    assert median is not None
    assert (2 * 2000 + 48 * 10) / 50 - 1 < median < (3 * 2000 + 47 * 10) / 50 + 1


def test_an_injected_fault_names_its_micro_batch() -> None:
    told = [
        FaultInjected(fault="overflow", step=5, micro_batch=0, target="head.weight"),
        FaultInjected(fault="kill", step=6),
    ]
    lines = shown(fold(*told, step(5)))
    assert "injected     overflow at step 5, micro-batch 0 in head.weight" in lines
    assert "injected     kill at step 6" in lines


def forecast(scale: float | None, best: int | None) -> list[str]:
    layers = (events.LayerGradients(name="all", values=1, looked_at=1),)
    rows = tuple(
        events.ScaleForecast(octaves=k, zeroed=0.5 if k < 0 else 0.0) for k in range(-2, 3)
    )
    sampled = events.GradientsSampled(
        step=1, layers=layers, loss_scale=scale, forecast=rows, best_octave=best, limit_octave=17
    )
    return gradients_text(sampled, None).splitlines()


def test_the_forecast_names_scales_and_says_what_follows() -> None:
    lines = forecast(65536.0, 0)
    at = next(i for i, line in enumerate(lines) if line.startswith("what fp16 would lose"))
    assert [line.split("  ")[0] for line in lines[at + 1 : at + 5]] == [
        "loss scale",
        "16384",
        "65536 (now)",
        "262144",
    ]
    assert lines[at + 2].split()[1:] == ["50", "%", "0", "0"]
    assert lines[-1].startswith("loss scales from 1 to 131072 fit these gradients: below, more")
    assert "1 (now: none)" in "\n".join(forecast(None, 0))
    assert forecast(65536.0, None)[-1].startswith("no scale fits these gradients: above 131072")
