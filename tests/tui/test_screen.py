"""The screen under keys and sizes, on a scripted job; pictures of it as a person sees them."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from mpwatch import events
from mpwatch.commands import Pause, StopAtBoundary, Unpause
from mpwatch_tui.app import WatchApp
from mpwatch_tui.dialogs import Ending, Help
from mpwatch_tui.drawn import Drawn
from mpwatch_tui.looks import Looks
from tests.support.hub_runs import frame
from tests.support.pictured import FACTS, screen, stepped, told
from tests.support.watched_world import MemoryPlaces

Body = Callable[[Pilot[int], WatchApp, MemoryPlaces], Coroutine[Any, Any, None]]
ENDED = msgspec.structs.replace(FACTS, state="finished", exit_code=0, ended_at=FACTS.started_at)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log shows local time, the pictures one time."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def on_screen(body: Body, size: tuple[int, int] = (80, 24), **options: Any) -> WatchApp:
    """Run `body` on a screen that has looked twice."""
    app, places = screen(**options)

    async def go() -> None:
        async with app.run_test(size=size) as pilot:
            await look(pilot, app)
            await look(pilot, app)
            await body(pilot, app, places)

    asyncio.run(go())
    return app


async def look(pilot: Pilot[int], app: WatchApp) -> None:
    app.look()
    await pilot.pause()


def panel(app: WatchApp, name: str) -> str:
    """The text of a panel."""
    return app.screen_stack[0].query_one(f"#{name}", Drawn).text()


def shown(app: WatchApp) -> set[str]:
    """The panels that have a place on the screen."""
    return {str(each.id) for each in app.screen_stack[0].query(Drawn) if each.size.area}


def test_space_pauses_and_goes_on_and_the_outcome_is_shown() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.press("space")
        await look(pilot, app)
        (sent,) = places.job.sent
        assert sent[1] == Pause()
        assert "pause: pending" in panel(app, "footer")
        done = [
            events.CommandRequested(id=sent[0], command="pause"),
            events.TrainingPaused(step=120),
            events.CommandApplied(id=sent[0], command="pause", step=120),
        ]
        places.job.feed([frame(event, 500 + at) for at, event in enumerate(done)])
        await look(pilot, app)
        assert "pause: applied at step 120" in panel(app, "footer")
        assert "space go on" in panel(app, "footer")
        assert "pause applied at step 120" in panel(app, "log")
        await pilot.press("space")
        await look(pilot, app)
        assert [command for _, command in places.job.sent] == [Pause(), Unpause()]

    on_screen(body, size=(100, 30))


@pytest.mark.parametrize(
    ("key", "sent", "stopped", "left"),
    [
        ("d", [], 0, True),
        ("enter", [], 0, True),
        ("s", [StopAtBoundary()], 0, False),
        ("k", [], 1, False),
        ("escape", [], 0, False),
        ("ctrl+c", [], 0, False),
    ],
)
def test_ctrl_c_asks(key: str, sent: list[object], stopped: int, left: bool) -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.press("ctrl+c")
        assert isinstance(app.screen, Ending)
        await pilot.press(key)
        await pilot.pause()
        if not left:
            await look(pilot, app)
            assert not isinstance(app.screen, Ending)
        assert [command for _, command in places.job.sent] == sent
        assert places.stopped == stopped

    app = on_screen(body)
    assert app.return_code == (0 if left else None)


def test_read_only_looks_and_never_asks_the_job() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        for key in ("space", "ctrl+c", "s", "k", "escape"):
            await pilot.press(key)
            await look(pilot, app)
        assert places.job.sent == []
        assert places.stopped == 0
        assert "space" not in panel(app, "footer")
        await pilot.press("q")

    assert on_screen(body, readonly=True).return_code == 0


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (59, 30), (200, 7)])
@pytest.mark.parametrize("looks", [Looks(), Looks(ascii=True)])
def test_the_question_of_ctrl_c_is_seen_whole_at_any_size(
    size: tuple[int, int], looks: Looks
) -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.press("question_mark", "ctrl+c")
        assert len(app.screen_stack) == 1
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert isinstance(app.screen, Ending)
        lines = "\n".join(
            "".join(segment.text for segment in strip)
            for strip in app.screen._compositor.render_strips()
        )
        for word in ("eave", "top", "boundary", "now", "esc", "nothing"):
            assert word in lines, lines

    on_screen(body, size=size, looks=looks)


@pytest.mark.parametrize("options", [{"replay": True}, {"facts": ENDED, "connection": "over"}])
def test_where_no_job_is_left_ctrl_c_just_leaves(options: dict[str, Any]) -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.press("space")
        assert places.job.sent == []
        assert "q leave" in panel(app, "footer") or options == {"replay": True}
        await pilot.press("ctrl+c")

    assert on_screen(body, **options).return_code == 0


def test_the_screen_stays_when_the_job_ends_and_says_how() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        places.job.feed([frame(events.JobExited(exit_code=3), 900)])
        places.given = msgspec.structs.replace(
            ENDED, state="crashed", exit_code=3, cause="ValueError: bad [red]news"
        )
        places.connection = "over"
        await look(pilot, app)
        await look(pilot, app)
        header = panel(app, "header")
        assert "crashed" in header
        assert "exit code 3" in header
        assert "ValueError: bad [red]news" in header
        assert "job exited with code 3" in panel(app, "log")
        assert "ended; from the record" in panel(app, "footer")

    assert on_screen(body, size=(120, 40)).return_code is None


def test_a_lost_connection_keeps_the_picture() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        before = panel(app, "loss"), panel(app, "log")
        places.connection = "silent"
        await look(pilot, app)
        assert "hub does not answer" in panel(app, "footer")
        assert (panel(app, "loss"), panel(app, "log")) == before

    on_screen(body)


def test_a_job_whose_hub_cannot_be_asked_is_shown_from_its_record() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        places.job.feed([frame(events.JobStarted(pid=4711), 900)])
        await look(pilot, app)
        assert "the job runs on node7; from the record" in panel(app, "footer")
        assert "space" not in panel(app, "footer")
        assert "4711" in panel(app, "log")
        await pilot.press("space")
        await look(pilot, app)
        assert places.job.sent == []
        assert "refused the job runs on node7" in panel(app, "footer")

    on_screen(body, connection="apart", size=(120, 30))


def test_only_what_changed_is_drawn_again() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        overview = app.screen_stack[0]
        drawn: list[str] = []
        for each in overview.query(Drawn):
            each.refresh = lambda *r, id=each.id, **o: drawn.append(id)  # type: ignore[method-assign, assignment, misc]
        await look(pilot, app)
        assert drawn == []
        places.job.feed([frame(events.HookDisabled(hook="h", error="e"), 950)])
        await look(pilot, app)
        assert set(drawn) == {"log"}

    on_screen(body)


def test_p_turns_to_the_next_plot_or_where_it_is_small_to_the_next_panel() -> None:
    async def turn(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        titles = []
        for _ in range(4):
            titles.append(panel(app, "second").split("\n")[0].strip("\u2500 "))
            await pilot.press("p")
            await pilot.pause()
        assert [title.rsplit(" ", 1)[0] for title in titles] == [
            "loss scale",
            "gradient norm",
            "time per step 80",
            "loss scale",
        ]

    async def small(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        seen = []
        for _ in range(5):
            seen.append(*(shown(app) - {"header", "log", "footer"}))
            await pilot.press("p")
            await pilot.pause()
        assert seen == ["loss", "second", "phases", "memory", "loss"]

    on_screen(turn, size=(120, 40))
    on_screen(small, size=(60, 20))


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40), (200, 60), (20, 6), (1, 1)])
def test_every_size_has_its_look_also_after_a_change_of_size(size: tuple[int, int]) -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.resize_terminal(*size)
        await look(pilot, app)
        if size[0] < 60:
            return
        assert panel(app, "header").count("\n") == (1 if size == (60, 20) else 2)
        assert "step 120" in panel(app, "header")
        plots = (
            [panel(app, "loss")] if size == (60, 20) else [panel(app, "loss"), panel(app, "second")]
        )
        for plot in plots:
            assert any("\u2800" < cell < "\u2900" for cell in plot)
        log = app.screen_stack[0].query_one("#log")
        assert (log.region.x > 0) == (size[0] >= 160)

    on_screen(body, size=(100, 30))


def test_help_covers_and_any_key_leads_back() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        await pilot.press("q")
        assert not isinstance(app.screen, Help)

    assert on_screen(body).return_code is None


def test_the_log_stands_still_while_scrolled_back() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        newest = panel(app, "log").splitlines()[-1]
        await pilot.press("pageup")
        back = panel(app, "log").splitlines()
        assert newest not in back
        lines = [events.OutputLine(text=f"new {n}", number=100 + n, offset=0) for n in range(5)]
        places.job.feed([frame(line, 700 + n) for n, line in enumerate(lines)])
        await look(pilot, app)
        assert panel(app, "log").splitlines()[1:] == back[1:]
        assert "rows below" in panel(app, "log")
        await pilot.press("end")
        assert panel(app, "log").endswith("new 4")

    on_screen(body)


def test_every_cell_is_ascii_where_the_terminal_is() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        hostile = events.OutputLine(text="caf\u00e9 \u6f22 \u2501", number=99, offset=0)
        places.job.feed([frame(hostile, 800)])
        for key in ("space", "question_mark", "escape", "ctrl+c"):
            await look(pilot, app)
            for y in range(app.size.height):
                row = "".join(s.text for s in app.screen._compositor.render_strips()[y])
                assert row.isascii(), row
            await pilot.press(key)
            await pilot.pause()

    on_screen(body, looks=Looks(ascii=True, colours=False), readonly=True)


def test_a_run_without_loss_scaling_shows_what_there_is() -> None:
    async def body(pilot: Pilot[int], app: WatchApp, places: MemoryPlaces) -> None:
        assert "gradient norm" in panel(app, "second")
        assert "scale" not in panel(app, "header")

    unscaled = {"loss_scale_before": None, "loss_scale_after": None}
    steps = [msgspec.structs.replace(stepped(n), **unscaled) for n in range(1, 40)]
    on_screen(body, frames=[frame(event, place) for place, event in enumerate(steps)])


def pictured(size: tuple[int, int], snap_compare: Any, then: str = "live", **options: Any) -> bool:
    app, places = screen(**options)

    async def looked(pilot: Pilot[int]) -> None:
        await look(pilot, app)
        await look(pilot, app)
        places.connection = then
        await look(pilot, app)

    return bool(snap_compare(app, terminal_size=size, run_before=looked))


def test_picture_small(snap_compare: Any) -> None:
    """60x20: two lines of header; one falling, waving loss with two marks above it; six lines of
    log, skipped steps in yellow; `live` in green at the bottom left, four keys at the right."""
    assert pictured((60, 20), snap_compare)


def test_picture_plain(snap_compare: Any) -> None:
    """80x24 in ASCII: plots of `*`, the phases' bar of different letters, borders of `-`. The hub
    does not answer: a line at the bottom says so and the picture is still there. No colours."""
    looks = Looks(ascii=True, colours=False)
    assert pictured((80, 24), snap_compare, looks=looks, frames=told(60), then="silent")


def test_picture_overview(snap_compare: Any) -> None:
    """120x40: three lines of header; loss on the left, the scale's three stairs on the right; the
    phases' bar mostly magenta; one GPU two thirds full; the log below."""
    assert pictured((120, 40), snap_compare)
