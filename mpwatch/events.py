"""What happened: one frozen Struct per kind of event, named in the past tense.

The contract between agent, hub, record and every watcher. Units stand in the names; what is not
known is None, never 0 or -1. A new field must have a default, so that neighbouring versions
understand each other. Nothing here reads a clock: the frame around an event carries the time.
"""

from typing import Final

import msgspec

from mpwatch.event_base import Event as Event
from mpwatch.numeric_events import (
    AccumulationChanged as AccumulationChanged,
)
from mpwatch.numeric_events import (
    ActivationsSampled as ActivationsSampled,
)
from mpwatch.numeric_events import (
    DiagnosisRaised as DiagnosisRaised,
)
from mpwatch.numeric_events import (
    FormatShares as FormatShares,
)
from mpwatch.numeric_events import (
    GradientsSampled as GradientsSampled,
)
from mpwatch.numeric_events import (
    LayerGradients as LayerGradients,
)
from mpwatch.numeric_events import (
    ModuleHeadroom as ModuleHeadroom,
)
from mpwatch.numeric_events import (
    NonfiniteFound as NonfiniteFound,
)
from mpwatch.numeric_events import (
    OverflowLocated as OverflowLocated,
)
from mpwatch.numeric_events import (
    PrecisionApplied as PrecisionApplied,
)
from mpwatch.numeric_events import (
    PrecisionRefused as PrecisionRefused,
)
from mpwatch.numeric_events import (
    ScaleForecast as ScaleForecast,
)
from mpwatch.numeric_events import (
    ScaleLimitReached as ScaleLimitReached,
)
from mpwatch.numeric_events import (
    ScalerRefused as ScalerRefused,
)
from mpwatch.numeric_events import (
    ScalerReplaced as ScalerReplaced,
)


class OptimizerDescribed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optimizer of the script. `index` is its order of first use, 0 for the one that leads."""

    index: int
    name: str
    parameter_tensors: int
    parameters: int


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory at the edges of one phase, in bytes.

    `kind` says what was read: "resident" is the process's anonymous resident memory (CPU),
    "allocated" the CUDA caching allocator's live bytes. `peak_bytes` is the largest reading at
    an edge of this phase: a lower bound of the true peak.
    """

    start_bytes: int
    end_bytes: int
    peak_bytes: int | None = None
    kind: str = "resident"


# --- from the agent ---------------------------------------------------------------------------


class AgentBound(Event, frozen=True, kw_only=True):
    """The process made an optimizer or ran a backward, and took the lock of its rank.

    `process` counts the processes that have been this rank within the attempt, from 0.
    """

    pid: int
    process_start_time: int | None
    process: int = 0
    world_size: int = 1
    host: str = ""
    python_version: str = ""
    torch_version: str = ""
    threads: int | None = None


class LoopFound(Event, frozen=True, kw_only=True):
    """What the agent found of the training loop, once known; `notes` says what it left alone."""

    optimizers: tuple[OptimizerDescribed, ...] = ()
    roots: tuple[str, ...] = ()
    device: str = "cpu"
    scaler: str | None = None
    compiled: bool = False
    notes: tuple[str, ...] = ()


class StepFinished(Event, frozen=True, kw_only=True):
    """One window of micro-batches that ended at `optimizer.step`.

    `losses` are the losses of the micro-batches as the script passed them to backward;
    `loss_divisor` is the accumulation divisor inside them where it was seen; `loss` is the true
    mean that a person expects to read. `applied` is a fact: the optimizer's update ran.
    `overflow` is None where nothing looked at the gradients. `grad_norm` is the 2-norm of the
    unscaled gradients, before clipping. `agent_s` is the agent's own time within the step and
    `sampled_s` the part of it spent on what is only done on sampled steps. `locate_us` is what it
    took to note, after a backward, whether gradients are finite: microseconds per micro-batch.
    """

    step: int
    applied: bool
    optimizer: int = 0
    micro_batches: int = 1
    script_window: int = 1
    multiplier: int = 1
    overflow: bool | None = None
    losses: tuple[float | None, ...] = ()
    loss_divisor: float | None = None
    loss: float | None = None
    loss_scale_before: float | None = None
    loss_scale_after: float | None = None
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    duration_s: float | None = None
    phase_s: dict[str, float] = msgspec.field(default_factory=dict)
    samples: int | None = None
    tokens: int | None = None
    memory: dict[str, PhaseMemory] | None = None
    agent_s: float = 0.0
    sampled_s: float = 0.0
    locate_us: float | None = None


class WindowDiscarded(Event, frozen=True, kw_only=True):
    """Backwards ran and their gradients were cleared without a step (by the script itself)."""

    optimizer: int = 0
    micro_batches: int = 1
    after_step: int = 0


class HookDisabled(Event, frozen=True, kw_only=True):
    """A hook of the agent failed and switched itself off; the loop never saw the error."""

    hook: str
    error: str


class EventsDropped(Event, frozen=True, kw_only=True):
    """The outbox was full: `count` events before this one were dropped, `total` so far."""

    count: int
    total: int


class CommandApplied(Event, frozen=True, kw_only=True):
    """The one outcome of a command that took effect, at `step` finished steps."""

    id: str
    command: str
    step: int
    note: str = ""


class CommandRefused(Event, frozen=True, kw_only=True):
    """The one outcome of a command that did not take effect, and why."""

    id: str
    command: str
    reason: str
    step: int | None = None


class TrainingPaused(Event, frozen=True, kw_only=True):
    """The loop waits at a boundary. Heartbeats follow until `training_unpaused`."""

    step: int


class TrainingUnpaused(Event, frozen=True, kw_only=True):
    """The loop goes on. `reason` is "command", or why the agent decided by itself."""

    step: int
    reason: str = "command"


class Heartbeat(Event, frozen=True, kw_only=True):
    """Sign of life of an agent that has nothing else to say; begins and ends no pause."""

    paused: bool = True


class FaultInjected(Event, frozen=True, kw_only=True):
    """A fault that `--inject` asked for was put in."""

    fault: str
    step: int
    micro_batch: int | None = None
    target: str = ""


class AgentStopping(Event, frozen=True, kw_only=True):
    """The script is being ended at a boundary: by "max_steps" or "stop_at_boundary"."""

    step: int
    reason: str


class AgentExited(Event, frozen=True, kw_only=True):
    """The interpreter is ending. `error_type` names the uncaught exception, if there was one.

    `windows_dropped` windows of the script wait for others to make up a step that will not come;
    of a loop with an accumulator of `watch()`, micro-batches.
    """

    steps: int
    error_type: str | None = None
    error: str | None = None
    windows_open: int = 0
    windows_dropped: int = 0


# --- from the hub -----------------------------------------------------------------------------


class HubStarted(Event, frozen=True, kw_only=True):
    """A hub took the run over; `resumed_after` is the last record sequence of its predecessor."""

    pid: int
    resumed_after: int = 0


class JobStarted(Event, frozen=True, kw_only=True):
    """The keeper spawned the script (or launcher) as `pid`."""

    pid: int
    process_start_time: int | None = None


class JobExited(Event, frozen=True, kw_only=True):
    """The keeper's child ended. `exit_code` as a shell sees it: 128 + n for signal n."""

    exit_code: int
    signal: str | None = None
    cause: str = ""


class JobStalled(Event, frozen=True, kw_only=True):
    """No event came for `silent_s` although the process lives."""

    silent_s: float
    last_step: int | None = None


class JobRecovered(Event, frozen=True, kw_only=True):
    """Events come again after a stall of `silent_s`."""

    silent_s: float


class FramesMissing(Event, frozen=True, kw_only=True):
    """A gap in the sequence numbers of rank `of_rank`: `count` frames never arrived."""

    count: int
    of_rank: int | None = None


class CommandRequested(Event, frozen=True, kw_only=True):
    """A watcher handed in a command and the hub took it; exactly one outcome will follow."""

    id: str
    command: str
    by: str = "person"
    arguments: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)


class GpuSampled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU as NVML reports it; utilisation in percent of the last sampling period."""

    index: int
    name: str = ""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class SystemSampled(Event, frozen=True, kw_only=True):
    """The machine and the job's process tree, as the hub sees them from outside."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    job_cpu_percent: float | None = None
    job_resident_bytes: int | None = None
    job_processes: int | None = None
    disk_free_bytes: int | None = None
    gpus: tuple[GpuSampled, ...] = ()


class OutputLine(Event, frozen=True, kw_only=True):
    """A line that the script printed, as a terminal would show it: text only, no escapes.

    `number` counts lines from 0. A number told again replaces the text told before: a progress bar
    draws its line anew. `unfinished` lines are still being drawn and will be told again. `offset`
    counts bytes of the output: those before it are told in full. `left_out` lines before this one
    were not told, since output came faster than it is recorded; they stand in `output.log`.
    """

    text: str
    number: int
    offset: int
    left_out: int = 0
    unfinished: bool = False


KINDS: Final[dict[str, type[Event]]] = {
    str(cls.__struct_config__.tag): cls for cls in Event.__subclasses__()
}
