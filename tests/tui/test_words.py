"""What the panels say: figures, log lines, header, bars; and that no text of a script can act."""

import math
from typing import Any

import pytest

from mpwatch import events
from mpwatch.codec import decode_event, decode_frame
from mpwatch.events import (
    CommandRefused,
    DiagnosisRaised,
    Event,
    FaultInjected,
    JobStarted,
    OutputLine,
    OverflowLocated,
)
from mpwatch.store import PhaseBytes, PhaseSeconds, RunView
from mpwatch_tui import bars, figures, heading
from mpwatch_tui.journal import KEPT_LINES, Journal
from mpwatch_tui.log_panel import wrapped
from mpwatch_tui.looks import Looks, Row
from mpwatch_tui.picture import Asked, Facts, LogLine, Picture
from tests.support.hub_runs import frame, step

PLAIN = Looks()
HOSTILE = "a\x1b[2Jb\x1b]52;c;QUJD\x07c\r\x07d\u202ee[bold]f[/]\x9b31mg"


def text(rows: list[Row]) -> list[str]:
    return ["".join(piece for piece, _ in row).rstrip() for row in rows]


def journal(*said: Event, **envelope: Any) -> list[str]:
    kept = Journal()
    for sequence, event in enumerate(said):
        data = decode_frame(frame(event, sequence, **envelope))
        kept.event(data, decode_event(data.event))
    return [line.text for line in kept.lines]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.number(None), "-"),
        (figures.number(0.00012345), "0.0001234"),
        (figures.number(math.nan), "nan"),
        (figures.scale(65536.0), "65536"),
        (figures.scale(2.0**40), "2^40"),
        (figures.scale(0.5), "0.5"),
        (figures.scale(math.inf), "inf"),
        (figures.seconds(0.0000123), "12.3 us"),
        (figures.seconds(0.0123), "12.3 ms"),
        (figures.seconds(7.5), "7.5 s"),
        (figures.elapsed(3723.9), "1:02:03"),
        (figures.elapsed(90061.0), "1d 1:01:01"),
        (figures.elapsed(-5.0), "0:00:00"),
        (figures.size(16e9), "16 GB"),
        (figures.size(999), "999 B"),
        (figures.rate(1234.5), "1234"),
        (figures.rate(0.0123), "0.0123"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


def test_the_log_tells_what_plots_do_not() -> None:
    said = journal(
        JobStarted(pid=12),
        step(1),
        step(2, applied=False, overflow=True, loss_scale_before=64.0, loss_scale_after=32.0),
        step(3, applied=False, overflow=True, loss_scale_before=32.0, loss_scale_after=16.0),
        OutputLine(text="epoch 1", number=0, offset=0),
        step(4, loss=math.nan),
        step(5, applied=False),
        CommandRefused(id="1", command="pause", reason="no"),
        FaultInjected(fault="overflow", step=6, micro_batch=2, target="head.weight"),
    )
    assert said == [
        "attempt 1 started as process 12",
        "2 of steps 2 to 3 skipped: overflow, scale 32 to 16",
        "epoch 1",
        "step 4 loss is nan",
        "step 5 skipped: the optimizer's update did not run",
        "pause refused: no",
        "injected overflow at step 6, micro-batch 2 in head.weight",
    ]


def test_the_log_names_where_an_overflow_was_once_per_place() -> None:
    def located(number: int, parameter: str) -> OverflowLocated:
        return OverflowLocated(
            step=number, micro_batch=1, parameter=parameter, module="head", nonfinite="inf",
            verdict="scale_too_high", evidence="room is small",
        )  # fmt: skip

    skipped = [step(n, applied=False, overflow=True) for n in range(1, 5)]
    found = [located(n, "head.weight" if n < 4 else "head.bias") for n in range(1, 5)]
    pairs = [event for pair in zip(skipped, found, strict=True) for event in pair]
    worst = DiagnosisRaised(name="scale_cannot_recover", severity="fault", step=4, evidence="so")
    place = "inf in head.{}, backward; scale_too_high: room is small"
    assert journal(*pairs, worst) == [
        "step 1 skipped: overflow",
        f"step 1, micro-batch 1: {place.format('weight')}",
        "3 of steps 2 to 4 skipped: overflow",
        f"step 4, micro-batch 1: {place.format('bias')}",
        "scale_cannot_recover: so",
    ]


def test_far_apart_steps_are_not_one_series() -> None:
    said = journal(*(step(n, applied=False, overflow=True) for n in (10, 500)))
    assert said == ["step 10 skipped: overflow", "step 500 skipped: overflow"]


def test_a_line_told_again_is_replaced_where_it_stands() -> None:
    bar = [OutputLine(text=f"bar {n} %", number=7, offset=0, unfinished=True) for n in (1, 50)]
    other = OutputLine(text="below", number=8, offset=0)
    done = OutputLine(text="bar 100 %", number=7, offset=0, left_out=3)
    assert journal(bar[0], other, step(1, loss=math.inf), bar[1], done) == [
        "bar 100 %   (3 lines before it are only in output.log)",
        "below",
        "step 1 loss is inf",
    ]


def test_the_log_is_bounded() -> None:
    lines = [OutputLine(text=str(n), number=n, offset=n) for n in range(KEPT_LINES + 50)]
    again = OutputLine(text="too late", number=0, offset=0)
    said = journal(*lines, again)
    assert len(said) == KEPT_LINES
    assert said[0] == "51"
    assert said[-2:] == [str(KEPT_LINES + 49), "too late"]


def test_other_ranks_are_named() -> None:
    assert journal(events.HookDisabled(hook="h", error="e"), rank=3) == ["rank 3: hook h is off: e"]


@pytest.mark.parametrize("looks", [Looks(), Looks(ascii=True)])
def test_text_of_a_script_can_not_draw_or_command(looks: Looks) -> None:
    said = journal(
        OutputLine(text=HOSTILE, number=0, offset=0),
        CommandRefused(id="1", command=HOSTILE, reason=HOSTILE),
        events.AgentExited(steps=1, error_type=HOSTILE, error=HOSTILE),
        events.LoopFound(device=HOSTILE, scaler=HOSTILE),
    )
    rows = [row for line in said for row in wrapped(LogLine(1, 0.0, "bad", line), 60, looks)]
    facts = Facts(run_id=HOSTILE, name=HOSTILE, cause=HOSTILE, state="crashed", exit_code=1)
    asked = Asked(words="pause", at=0.0, outcome="refused", detail=HOSTILE)
    picture = Picture(facts=facts, connection="live", asked=asked, trouble=HOSTILE)
    rows += heading.header_rows(picture, 300, 3, looks)
    rows.append(heading.footer_row(picture, [], 300, looks))
    for shown in text(rows):
        assert not [c for c in shown if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"]
        assert not looks.ascii or shown.isascii()
    # Without a sequence, what was text in it stays text: no markup is read.
    assert any("[bold]f[/]" in shown for shown in text(rows))


def test_a_long_line_is_wrapped_beside_the_clock() -> None:
    rows = text(wrapped(LogLine(1, 0.0, "output", "x" * 100), 60, PLAIN))
    assert [len(row) for row in rows] == [60, 58]
    assert rows[1].startswith(" " * 9 + "x")
    wide = text(wrapped(LogLine(1, 0.0, "output", "\u6f22" * 40), 60, PLAIN))
    assert [row.count("\u6f22") for row in wide] == [25, 15]


def view(**fields: Any) -> RunView:
    given = {"steps": 120, "applied": 118, "skipped": 2, "loss": 1.9, "loss_scale": 16384.0}
    return RunView(**{**given, **fields})


def test_the_header_keeps_what_matters_when_there_is_little_room() -> None:
    window = {"script_window": 2, "multiplier": 2, "accumulation_steps": 4}
    seen = view(step_s=0.08, samples_per_s=400.0, **window)
    facts = Facts(run_id="id", name="gpt", state="running", started_at=10.0)
    picture = Picture(facts=facts, view=seen, now=105.0)
    assert text(heading.header_rows(picture, 60, 2, Looks(ascii=True))) == [
        " * running  gpt  0:01:35  accum 2x2=4  attempt 1  id",
        " step 120  12.5 steps/s  loss 1.9  scale 16384  skipped 2",
    ]
    assert text(heading.header_rows(picture, 120, 3, Looks(ascii=True))) == [
        " * running  gpt  0:01:35  attempt 1  id",
        " step 120  12.5 steps/s  400 samples/s  accum 2x2=4",
        " loss 1.9  scale 16384  skipped 2  applied 118",
    ]


def test_micro_batches_per_update_are_named_and_not_multiplied_by_one() -> None:
    def window(**fields: int) -> str:
        facts = Facts(run_id="id", name="gpt", state="running", started_at=10.0)
        picture = Picture(facts=facts, view=view(**fields), now=105.0)
        return text(heading.header_rows(picture, 120, 3, PLAIN))[1]

    assert window(script_window=4, multiplier=1, accumulation_steps=4).endswith("accum 4")
    shown = window(script_window=2, multiplier=2, accumulation_steps=4)
    assert shown.endswith("accum 2\u00d72=4")


def test_memory_says_whose_it_is() -> None:
    """The job's memory is not the phases'; at the width of a small terminal's panel."""
    system = events.SystemSampled(job_resident_bytes=2 * 10**9, memory_total_bytes=32 * 10**9)
    held = {"forward": PhaseBytes(start=1, peak=241 * 10**6, end=1, kind="resident")}
    rows = text(bars.memory_rows(view(system=system, memory_bytes=held), 39, 4, Looks(ascii=True)))
    assert rows[0] == "- memory: job, and resident by phase --"
    assert rows[1].split("-")[-1] == " 2 GB of 32 GB"
    assert rows[1].startswith(" whole job ")
    assert rows[2] == " forward    ####### 241 MB peak seen"
    assert max(map(len, rows)) <= 39


def test_time_stands_still_when_the_job_does() -> None:
    def clock(state: str, **fields: Any) -> str:
        facts = Facts(run_id="id", state=state, started_at=100.0, **fields)
        picture = Picture(facts=facts, view=view(last_event_time=160.0), now=400.0)
        return text(heading.header_rows(picture, 80, 3, PLAIN))[0].split("  ")[2]

    assert clock("running") == "0:05:00"
    assert clock("lost") == "0:01:00"
    assert clock("killed", ended_at=220.0) == "0:02:00"


def test_the_footer_says_what_the_picture_is_worth() -> None:
    def foot(width: int = 100, **fields: Any) -> str:
        picture = Picture(facts=Facts(run_id="id"), since=100.0, now=112.0, **fields)
        return text([heading.footer_row(picture, [("q", "detach")], width, PLAIN)])[0].strip()

    assert foot(connection="live").startswith("live ")
    assert foot(connection="live").endswith("q detach")
    seen = foot(connection="lost", view=view(cursor=9))
    assert "hub lost (0:00:12), last picture; job goes on" in seen
    # It never came up: there is no picture to speak of.
    assert "no hub (0:00:12), see hub.log; job goes on" in foot(connection="lost")
    apart = foot(connection="apart", apart="the job runs on node7")
    assert apart.startswith("the job runs on node7; from the record")
    assert "hub does not answer (0:00:12)" in foot(connection="silent")
    assert foot(connection="over").startswith("the job runs: mpwatch attach; from the record")
    asked = Asked(words="pause", at=100.0, outcome="applied", detail="at step 9")
    assert "pause: applied at step 9" in foot(connection="live", asked=asked)
    old = Asked(words="pause", at=50.0, outcome="applied")
    assert "pause" not in foot(connection="live", asked=old)
    pending = Asked(words="pause", at=50.0)
    assert "pause: pending" in foot(connection="live", asked=pending)
    assert "detach" not in foot(width=12, connection="live")


def test_phases_share_the_bar_as_they_share_the_time() -> None:
    spent = {"data": 1.0, "forward": 3.0, "backward": 5.0, "optimizer": 1.0}
    phases = {name: PhaseSeconds(median=s / 10, total=s) for name, s in spent.items()}
    rows = text(bars.phase_rows(view(phase_s=phases), 40, 6, Looks(ascii=True)))
    assert rows == [
        "- time by phase ------------------------",
        "dddd" + "#" * 12 + "=" * 20 + "++++",
        "d data        10 %   100 ms a step",
        "# forward     30 %   300 ms a step",
        "= backward    50 %   500 ms a step",
        "+ optimizer   10 %   100 ms a step",
    ]
    # With less room the smallest go, the order stays.
    short = text(bars.phase_rows(view(phase_s=phases), 40, 4, Looks(ascii=True)))
    assert [row.split()[1] for row in short[2:]] == ["forward", "backward"]


def test_without_colours_neighbours_in_a_bar_have_different_glyphs() -> None:
    glyphs = [Looks(colours=False).fill(name) for name in ("data", "forward", "backward", "other")]
    assert len(set(glyphs)) == 4
    assert {Looks().fill(name) for name in ("data", "forward")} == {"\u2588"}
