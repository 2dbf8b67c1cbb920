"""Events as lines of the log: what a person wants to read of them, and how much is kept.

Most steps say nothing here (the plots show them); those that were skipped or whose loss is not
finite do, and runs of them are one line. Bounded, whatever comes.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mpwatch.codec import Frame
from mpwatch.events import Event, JobStarted, OutputLine, OverflowLocated
from mpwatch.vocabulary import clean_text
from mpwatch_tui import figures
from mpwatch_tui.looks import Tone
from mpwatch_tui.picture import LogLine

KEPT_LINES: Final = 1000
OUTPUT_LIMIT: Final = 1000
# Steps between two of a series that are still told as one.
SERIES_GAP: Final = 10
# As many lines as a script can still change, and some.
OUTPUT_REMEMBERED: Final = 100


class Said(NamedTuple):
    """What one event says. Lines of one `series` in a row become one, told from its first step."""

    tone: Tone
    text: str
    series: str = ""
    step: int = 0


class Journal:
    """The newest lines of the log."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._number = 0
        # Where the newest lines of output stand: the number of an output line, and of our line.
        self._output: dict[int, int] = {}
        self._series, self._series_count = "", 0
        self._series_began = self._series_step = 0
        self._place: tuple[int, str | None, str | None, str] | None = None
        self._tuple: tuple[LogLine, ...] | None = ()

    @property
    def lines(self) -> tuple[LogLine, ...]:
        """The lines, oldest first; the same object while nothing is added."""
        if self._tuple is None:
            self._tuple = tuple(self._lines)
        return self._tuple

    def event(self, frame: Frame, event: Event) -> None:
        """Add what `event` says, if it says anything."""
        if isinstance(event, OverflowLocated) and self._was_there(frame, event):
            return
        said = told(frame, event)
        if said is None or (isinstance(event, OutputLine) and self._told_again(event, said)):
            return
        if said.series and self._goes_on(said):
            self._lines.pop()
            self._number -= 1
            self._series_count += 1
        else:
            self._series, self._series_began = said.series, said.step
            self._series_count = 1
        self._series_step = said.step
        text = said.text
        if said.series:
            steps = f"step {said.step}"
            if self._series_count > 1:
                steps = f"{self._series_count} of steps {self._series_began} to {said.step}"
            text = f"{steps} {text}"
        self._append(frame.time, said.tone, text)

    def _was_there(self, frame: Frame, event: OverflowLocated) -> bool:
        """Whether the overflow told last was in the same place: while a scale comes down, say."""
        before = self._place
        self._place = (frame.rank, event.parameter, event.module, event.verdict)
        return before == self._place

    def _goes_on(self, said: Said) -> bool:
        """Whether the newest line tells of the same thing, a few steps ago."""
        return said.series == self._series and said.step - self._series_step <= SERIES_GAP

    def _told_again(self, event: OutputLine, said: Said) -> bool:
        """A progress bar draws its line anew: replace it where it stands."""
        place = self._output.get(event.number)
        if place is None:
            self._output[event.number] = self._number + 1
            if len(self._output) > OUTPUT_REMEMBERED:
                del self._output[next(iter(self._output))]
            return False
        index = place - self._lines[0].number if self._lines else -1
        if 0 <= index < len(self._lines):
            line = self._lines[index]
            self._lines[index] = LogLine(line.number, line.time, said.tone, said.text)
            self._tuple = None
        return True

    def say(self, time: float, tone: Tone, text: str) -> None:
        """Add a line of our own."""
        self._series = ""
        self._append(time, tone, text)

    def _append(self, time: float, tone: Tone, text: str) -> None:
        self._number += 1
        self._lines.append(LogLine(self._number, time, tone, text))
        self._tuple = None


def told(frame: Frame, event: Event) -> Said | None:
    """What `event` says in the log; None for the many that other panels show."""
    if isinstance(event, JobStarted):
        return Said("event", f"attempt {frame.attempt} started as process {event.pid}")
    teller = _TELLERS.get(str(event.__struct_config__.tag))
    said = None if teller is None else teller(event)
    if said is not None and frame.rank > 0 and said.tone != "output":
        return said._replace(text=f"rank {frame.rank}: {said.text}", series="")
    return said


def _step(event: Any) -> Said | None:
    if not event.applied:
        scales = (event.loss_scale_before, event.loss_scale_after)
        moved = f", scale {figures.scale(scales[0])} to {figures.scale(scales[1])}"
        why = "overflow" if event.overflow else "the optimizer's update did not run"
        text = f"skipped: {why}" + (moved if None not in scales and scales[0] != scales[1] else "")
        return Said("warn", text, f"skipped {event.optimizer}", event.step)
    if event.loss is not None and not math.isfinite(event.loss):
        return Said("bad", f"loss is {event.loss}", f"loss {event.optimizer}", event.step)
    return None


def _output(event: Any) -> Said:
    text = clean_text(event.text, OUTPUT_LIMIT)
    if event.left_out:
        text += f"   ({event.left_out} lines before it are only in output.log)"
    return Said("output", text)


def _bound(event: Any) -> Said:
    torch = f", torch {clean_text(event.torch_version, 40)}" if event.torch_version else ""
    return Said("event", f"training found in process {event.pid}{torch}")


def _loop(event: Any) -> Said:
    names = ", ".join(
        f"{clean_text(each.name, 60)} ({each.parameters} parameters)"
        for each in event.optimizers[:3]
    )
    scaler = f", {clean_text(event.scaler, 60)}" if event.scaler else ", no loss scaling"
    return Said("event", f"loop: {names} on {clean_text(event.device, 40)}{scaler}")


def _exited(event: Any) -> Said:
    if event.error_type:
        error = clean_text(f"{event.error_type}: {event.error or ''}", 400)
        return Said("bad", f"the script ended by {error}")
    return Said("event", f"the script is ending after {event.steps} steps")


def _job_exited(event: Any) -> Said:
    tone: Tone = "good" if event.exit_code == 0 else "bad"
    by = f" ({clean_text(event.signal, 20)})" if event.signal else ""
    return Said(tone, f"job exited with code {event.exit_code}{by}")


def _hub(event: Any) -> Said | None:
    if not event.resumed_after:
        return None
    return Said("event", "a new hub took over; the history goes on")


def _refused(event: Any) -> Said:
    reason = clean_text(event.reason, 300)
    return Said("warn", f"{clean_text(event.command, 40)} refused: {reason}")


def _applied(event: Any) -> Said:
    return Said("good", f"{clean_text(event.command, 40)} applied at step {event.step}")


def _fault(event: Any) -> Said:
    micro = "" if event.micro_batch is None else f", micro-batch {event.micro_batch}"
    target = f" in {clean_text(event.target, 80)}" if event.target else ""
    text = f"injected {clean_text(event.fault, 20)} at step {event.step}{micro}{target}"
    return Said("warn", text)


def _place(event: Any) -> str:
    """Where an overflow was, and what that speaks for."""
    micro = "" if event.micro_batch is None else f", micro-batch {event.micro_batch}"
    kind = clean_text(event.nonfinite or "not finite", 20)
    where = clean_text((event.module if event.where == "forward" else event.parameter) or "?", 100)
    verdict = f"{clean_text(event.verdict, 30)}: {clean_text(event.evidence, 300)}"
    return f"step {event.step}{micro}: {kind} in {where}, {event.where}; {verdict}"


_TELLERS: Final[dict[str, Callable[[Any], Said | None]]] = {
    "step_finished": _step,
    "output_line": _output,
    "agent_bound": _bound,
    "loop_found": _loop,
    "agent_exited": _exited,
    "job_exited": _job_exited,
    "hub_started": _hub,
    "command_refused": _refused,
    "command_applied": _applied,
    "fault_injected": _fault,
    "command_requested": lambda e: Said(
        "event", f"{clean_text(e.command, 40)} asked by {clean_text(e.by, 40)}"
    ),
    "job_stalled": lambda e: Said("warn", f"no sign of life for {e.silent_s:.0f} s"),
    "job_recovered": lambda e: Said("good", f"signs of life again after {e.silent_s:.0f} s"),
    "training_paused": lambda e: Said("warn", f"paused after step {e.step}"),
    "training_unpaused": lambda e: Said(
        "good", f"goes on after step {e.step} ({clean_text(e.reason, 80)})"
    ),
    "agent_stopping": lambda e: Said(
        "event", f"stopping after step {e.step} ({clean_text(e.reason, 40)})"
    ),
    "overflow_located": lambda e: Said("warn", _place(e)),
    "diagnosis_raised": lambda e: Said(
        "bad" if e.severity == "fault" else "event" if e.severity == "info" else "warn",
        f"{clean_text(e.name, 60)}: {clean_text(e.evidence, 400)}",
    ),
    "hook_disabled": lambda e: Said(
        "warn", f"hook {clean_text(e.hook, 60)} is off: {clean_text(e.error, 300)}"
    ),
    "events_dropped": lambda e: Said("warn", f"{e.count} events dropped by a full outbox"),
    "frames_missing": lambda e: Said("warn", f"{e.count} events never arrived"),
}
