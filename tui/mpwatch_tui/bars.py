"""Where the time of a step goes, and memory: bars and figures as rows of text. Pure."""

from collections.abc import Mapping, Sequence

from mpwatch.store import PhaseSeconds, RunView
from mpwatch.vocabulary import PHASES
from mpwatch_tui import figures
from mpwatch_tui.chart import title
from mpwatch_tui.looks import Looks, Piece, Row

NAME_WIDTH = 10


def phase_rows(view: RunView, width: int, height: int, looks: Looks) -> list[Row]:
    """A bar of all phases by their time so far, then one row for each, as many as fit."""
    rows: list[Row] = [title("time by phase", width, looks)]
    spent = [(name, view.phase_s[name]) for name in PHASES if name in view.phase_s]
    total = sum(seconds.total for _, seconds in spent)
    if total <= 0:
        return _fitted([*rows, ((" nothing yet", "dim"),)], height)
    rows.append(_stack(spent, total, width, looks))
    for name, seconds in _largest(spent, height - len(rows)):
        share = f"{100 * seconds.total / total:3.0f} %"
        figure = f"{figures.seconds(seconds.median):>8} a step"
        rows.append(
            (
                (looks.fill(name), name),
                (f" {name:<{NAME_WIDTH}} {share}", "plain"),
                (f" {figure}", "dim"),
            )
        )
    return _fitted(rows, height)


def _stack(
    spent: Sequence[tuple[str, PhaseSeconds]], total: float, width: int, looks: Looks
) -> Row:
    pieces: list[Piece] = []
    done, before = 0, 0.0
    for name, seconds in spent:
        before += seconds.total
        end = round(before / total * width)
        pieces.append((looks.fill(name) * (end - done), name))
        done = end
    return tuple(pieces)


def _largest(
    spent: Sequence[tuple[str, PhaseSeconds]], count: int
) -> list[tuple[str, PhaseSeconds]]:
    """The `count` phases that took longest, in the order in which they come."""
    ranked = sorted(spent, key=lambda entry: entry[1].total, reverse=True)[: max(0, count)]
    return [entry for entry in spent if entry in ranked]


def memory_rows(view: RunView, width: int, height: int, looks: Looks) -> list[Row]:
    """GPUs and the job's processes from outside, then the largest reading of each phase."""
    kinds = sorted({looks.text(held.kind, 20) for held in view.memory_bytes.values()})
    by_phase = f": job, and {', '.join(kinds)} by phase" if kinds else ""
    rows: list[Row] = [title(f"memory{by_phase}", width, looks)]
    rows += _system_rows(view, width, looks)
    peaks: dict[str, int] = {n: view.memory_bytes[n].peak for n in PHASES if n in view.memory_bytes}
    rows += _peak_rows(peaks, width, looks)
    if len(rows) == 1:
        rows.append(((" nothing yet", "dim"),))
    return _fitted(rows, height)


def _system_rows(view: RunView, width: int, looks: Looks) -> list[Row]:
    system = view.system
    if system is None:
        return []
    rows: list[Row] = []
    for gpu in system.gpus[:4]:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        words = f"{figures.size(used)} of {figures.size(total)}"
        if gpu.utilization_percent is not None:
            words += f", {gpu.utilization_percent:.0f} % busy"
        rows.append(_level(f"gpu {gpu.index}", used, total, words, width, looks))
    if system.job_resident_bytes is not None:
        used, total = system.job_resident_bytes, system.memory_total_bytes
        words = f"{figures.size(used)} of {figures.size(total)}"
        rows.append(_level("whole job", used, total, words, width, looks))
    return rows


def _peak_rows(peaks: Mapping[str, int], width: int, looks: Looks) -> list[Row]:
    most = max(peaks.values(), default=0)
    return [
        _level(name, peak, most, f"{figures.size(peak)} peak seen", width, looks)
        for name, peak in peaks.items()
    ]


def _level(
    name: str, value: float | None, whole: float | None, words: str, width: int, looks: Looks
) -> Row:
    room = max(4, min(20, width - NAME_WIDTH - 22))
    part = value / whole if value is not None and whole else 0.0
    filled = round(max(0.0, min(1.0, part)) * room)
    return (
        (f" {name:<{NAME_WIDTH}} ", "plain"),
        (looks.level * filled, "memory"),
        (looks.dot * (room - filled), "dim"),
        (f" {words}", "plain"),
    )


def _fitted(rows: list[Row], height: int) -> list[Row]:
    return (rows + [()] * height)[:height]
