"""Every style of training loop: seen right, and left exactly as it was.

Expectations come from plain runs: what a script prints, and the books that it keeps by hand about
its own windows and steps. `tests/support/styles/table.py` lists the styles and the subtle counts.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mpwatch.cli.main import main
from tests.support.forge import Forge
from tests.support.style_runs import StyleRuns
from tests.support.styles.table import STYLES, Style

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name),
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Off here: a style's other run goes on while a test looks at one; `runs` waits for all."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Iterator[StyleRuns]:
    """Both runs of every style that these tests ask for."""
    everything = StyleRuns(tmp_path_factory.mktemp("styles"), forge)
    yield everything
    everything.close()


def test_plain_run_keeps_sensible_books(style: Style, runs: StyleRuns) -> None:
    plain = runs.plain(style)
    assert plain.exit_code == style.exit_code, plain.stderr
    assert re.search(r"^WEIGHTS [0-9a-f]{64}$", plain.stdout, re.MULTILINE)
    assert plain.books["steps"] == plain.books["applied"] + plain.books["skipped"]
    assert (plain.books["skipped"] > 0) == style.skips
    if style.compiled:
        graphs = re.search(r"^graphs (\d+)", plain.stdout, re.MULTILINE)
        assert graphs is not None
        assert int(graphs[1]) > 0
    if style.state == "never_trained":
        assert plain.books["steps"] == plain.books["left_over"] == 0


def test_watching_changes_nothing(
    style: Style, runs: StyleRuns, request: pytest.FixtureRequest
) -> None:
    """Output with losses and weights, graphs and breaks where compiled, errors, exit code."""
    if style.known:
        request.applymarker(pytest.mark.xfail(reason=style.known))
    plain, watched = runs.plain(style), runs.watched(style)
    assert watched.stdout == plain.stdout
    assert watched.exit_code == plain.exit_code
    ours, theirs = script_lines(watched.stderr), script_lines(plain.stderr)
    if style.through_modules:
        ours, theirs = without_module_frames(ours), without_module_frames(theirs)
    assert ours == theirs
    assert json.dumps(watched.books) == json.dumps(plain.books)  # as text: NaN is not equal to NaN


def test_show_counts_right(
    style: Style, runs: StyleRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    books, watched = runs.plain(style).books, runs.watched(style)
    shown = json.loads(verb("show", style, runs, capsys))
    assert (shown["state"], shown["exit_code"]) == (style.state, style.exit_code), watched.stderr
    if style.state == "never_trained":  # over before the hub was there, perhaps: null
        assert not any(shown[total] for total in ("steps", "applied", "skipped"))
        return
    for total in ("steps", "applied", "skipped"):
        assert shown[total] == books[total], total
    if len(set(books["micro_batches"])) == 1 and not style.unseen:
        assert shown["script_window"] == books["micro_batches"][0]


def test_events_tell_the_truth(
    style: Style, runs: StyleRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step of each optimizer: number, applied or skipped, micro-batches, their losses."""
    books, watched = runs.plain(style).books, runs.watched(style)
    if not list(runs.runs_dir(style).glob("*/record.sqlite")):
        assert style.state == "never_trained", watched.stderr
        return
    lines = verb("tail", style, runs, capsys, "--no-follow").splitlines()
    events = [json.loads(line) for line in lines]
    told = {
        index: [
            event
            for event in events
            if event["kind"] == "step_finished" and event.get("optimizer", 0) == int(index)
        ]
        for index in books["optimizers"]
    }
    assert sum(map(len, told.values())) == count(events, "step_finished"), "an optimizer too many"
    for index, expected in books["optimizers"].items():
        steps = told[index]
        assert [step["step"] for step in steps] == list(range(1, expected["steps"] + 1))
        assert [step["applied"] for step in steps] == expected["outcomes"]
        if style.unseen:
            assert not any(loss for step in steps for loss in step.get("losses", []))
            continue
        assert [step.get("micro_batches", 1) for step in steps] == expected["micro_batches"]
        losses = [numbers(step.get("losses", [])) for step in steps]
        assert repr(losses) == repr(expected["losses"])
    assert count(events, "window_discarded") == books["discarded"]
    assert count(events, "hook_disabled") == count(events, "events_dropped") == 0, watched.stderr


def verb(
    name: str, style: Style, runs: StyleRuns, capsys: pytest.CaptureFixture[str], *flags: str
) -> str:
    """What `mpwatch NAME --json` prints of the style's watched run."""
    (run,) = runs.runs_dir(style).glob("*/run.json")
    capsys.readouterr()
    assert main([name, "--json", *flags, str(run.parent)]) == 0
    return capsys.readouterr().out


def count(events: list[dict[str, Any]], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)


def numbers(losses: list[float | str | None]) -> list[float | None]:
    """Non-finite numbers are words in our JSON."""
    return [None if loss is None else float(loss) for loss in losses]


def script_lines(stderr: str) -> str:
    """What the script wrote: not our lines, and without time and process in torch's own logs."""
    lines = [line for line in stderr.splitlines() if not line.startswith("mpwatch:")]
    return "\n".join(re.sub(r"^([VIWE]\d{4}) [\d:.]+ +\d+ ", r"\1 ", line) for line in lines)


def without_module_frames(traceback: str) -> str:
    """A traceback without the frames in which nn.Module calls its hooks and forward."""
    frame = r'  File "[^"\n]*/torch/nn/modules/module\.py", line .*\n(?:    .*\n)*'
    return re.sub(frame, "", traceback)
