"""What a fold remembers between events: mutable, bounded, saved with the record.

Data and its small invariants only; `mpwatch.fold` reads events into it. A field added later must
have a default, so that a newer hub continues from an older fold.
"""

from typing import Any, Final, TypeVar

import msgspec

from mpwatch.codec import Frame
from mpwatch.events import (
    ActivationsSampled,
    GradientsSampled,
    OptimizerDescribed,
    PhaseMemory,
    SystemSampled,
)
from mpwatch.quantiles import LogHistogram
from mpwatch.store import (
    AttemptSeen,
    DiagnosisSeen,
    FaultSeen,
    HookSeen,
    OverflowSeen,
    PrecisionSeen,
    ScalingSeen,
)

MAX_SEGMENTS: Final = 4000
MAX_ENTRIES: Final = 200
MAX_OPTIMIZERS: Final = 64

T = TypeVar("T")


class Segment(msgspec.Struct, array_like=True):
    """Neighbouring steps that are alike, so that steps taken back can be taken out of the sums."""

    first_step: int
    count: int
    applied: int
    samples: int
    tokens: int


class StepCounts(msgspec.Struct):
    """Counts of one optimizer of rank 0.

    Exact through any restart as long as at most `MAX_SEGMENTS` changes (applied to skipped, one
    number of samples to another) lie between the checkpoint and the crash; beyond, in proportion.
    """

    steps: int = 0
    applied: int = 0
    skipped: int = 0
    superseded: int = 0
    samples: int = 0
    tokens: int = 0
    segments: list[Segment] = []

    def add(self, step: int, applied: bool, samples: int, tokens: int) -> None:
        """Count a step; steps from this number on that are there already are superseded."""
        if step <= self.steps:
            self._take_back(step)
        self.steps = step
        self.applied += applied
        self.skipped += not applied
        self.samples += samples
        self.tokens += tokens
        last = self.segments[-1] if self.segments else None
        if (
            last is not None
            and step == last.first_step + last.count
            and last.applied == applied * last.count
            and last.samples == samples * last.count
            and last.tokens == tokens * last.count
        ):
            last.count += 1
            last.applied += applied
            last.samples += samples
            last.tokens += tokens
            return
        self.segments.append(Segment(step, 1, int(applied), samples, tokens))
        if len(self.segments) > MAX_SEGMENTS:
            self._merge_oldest()

    def _take_back(self, step: int) -> None:
        while self.segments:
            last = self.segments[-1]
            kept = max(0, min(last.count, step - last.first_step))
            gone = last.count - kept
            if not gone:
                break
            part = Segment(
                last.first_step,
                kept,
                last.applied * kept // last.count,
                last.samples * kept // last.count,
                last.tokens * kept // last.count,
            )
            self.superseded += gone
            self.applied -= last.applied - part.applied
            self.skipped -= gone - (last.applied - part.applied)
            self.samples -= last.samples - part.samples
            self.tokens -= last.tokens - part.tokens
            if kept:
                self.segments[-1] = part
                break
            self.segments.pop()

    def _merge_oldest(self) -> None:
        first, second = self.segments[0], self.segments[1]
        self.segments[:2] = [
            Segment(
                first.first_step,
                first.count + second.count,
                first.applied + second.applied,
                first.samples + second.samples,
                first.tokens + second.tokens,
            )
        ]


class Answer(msgspec.Struct, frozen=True):
    """What one rank said to a command: the step it was applied at, or why not."""

    step: int | None
    reason: str | None
    note: str = ""


class CommandState(msgspec.Struct):
    """A command on its way, with the answers of the ranks so far."""

    id: str
    command: str
    by: str = ""
    args: dict[str, Any] = {}
    answers: dict[int, Answer] = {}
    outcome: str | None = None
    step: int | None = None
    reason: str | None = None


class RankState(msgspec.Struct):
    """One rank's newest process. `sequence` and `time` are those of its newest frame."""

    rank: int
    attempt: int
    sequence: int = -1
    time: float = 0.0
    process: int = 0
    pid: int | None = None
    process_start_time: int | None = None
    host: str = ""
    bound_at: float | None = None
    steps: int = 0
    paused: bool = False
    paused_at: int = 0  # the step after which the newest pause began
    exited: bool = False
    error_type: str | None = None
    error: str | None = None
    dropped: int = 0
    dropped_before: int = 0
    newest_steps: dict[int, int] = {}  # by optimizer


class RecentStep(msgspec.Struct, array_like=True):
    """What rates and the script's window are taken from."""

    duration_s: float | None
    samples: int | None
    script_window: int


class MemoryState(msgspec.Struct):
    """A phase's memory when last sampled, and the largest reading so far."""

    last: PhaseMemory | None = None
    peak_bytes: int = 0


class FoldState(msgspec.Struct):
    """Everything; the order of fields is the order of the view."""

    cursor: int = 0
    counts: dict[int, StepCounts] = {}
    discarded_windows: int = 0
    multiplier: int | None = None
    loss_scale: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    samples_known: bool = False
    tokens_known: bool = False
    recent: list[RecentStep] = []
    phases: dict[str, LogHistogram] = {}
    memory: dict[str, MemoryState] = {}
    precision: PrecisionSeen | None = None
    scaling: ScalingSeen | None = None
    overflows: list[OverflowSeen] = []
    overflow_count: int = 0
    diagnoses: list[DiagnosisSeen] = []
    locate_us: float | None = None
    gradients: GradientsSampled | None = None
    activations: ActivationsSampled | None = None
    commands: dict[str, CommandState] = {}
    faults: list[FaultSeen] = []
    decisions: list[dict[str, Any]] = []
    windows_dropped: int = 0
    missing_frames: int = 0
    hooks_disabled: list[HookSeen] = []
    agent_s: float = 0.0
    sampled_s: float = 0.0
    timed_steps: int = 0
    # The agent's time per leading step, and the stretch of steps that is not counted there yet.
    agent_times: LogHistogram = msgspec.field(default_factory=LogHistogram)
    agent_open_s: float = 0.0
    agent_open_steps: int = 0
    agent_open_duration_s: float = 0.0
    described: tuple[OptimizerDescribed, ...] = ()
    roots: tuple[str, ...] = ()
    device: str | None = None
    scaler: str | None = None
    compiled: bool = False
    notes: tuple[str, ...] = ()
    torch_version: str = ""
    python_version: str = ""
    threads: int | None = None
    world_size: int = 1
    ranks: dict[int, RankState] = {}
    attempts: list[AttemptSeen] = []
    silent_s: float | None = None
    stopping: str | None = None
    system: SystemSampled | None = None
    first_event_time: float | None = None
    last_event_time: float | None = None
    hubs: int = 0
    hub_sequence: int = -1
    rejected: dict[str, int] = {}
    record_dropped: int = 0
    record_error: str | None = None
    # Where the telling of the script's output goes on: a byte, and the line that begins there.
    output_offset: int = 0
    output_lines: int = 0


def rank_of(state: FoldState, frame: Frame) -> RankState:
    """The newest process of the frame's rank; another attempt is another process."""
    rank = state.ranks.get(frame.rank)
    if rank is None or rank.attempt != frame.attempt:
        dropped = 0 if rank is None else rank.dropped_before + rank.dropped
        steps = {} if rank is None else rank.newest_steps
        rank = RankState(frame.rank, frame.attempt, dropped_before=dropped, newest_steps=steps)
        state.ranks[frame.rank] = rank
    return rank


def append(entries: list[T], entry: T, limit: int) -> None:
    """Append, and forget the oldest beyond `limit`."""
    entries.append(entry)
    if len(entries) > limit:
        del entries[0]
