"""The folded state of a run, as watchers see it: immutable, bounded, complete for `show`.

Data only. `mpwatch.fold` makes these from events; hub, record and every watcher pass them on.
Lists hold the newest entries and are bounded whatever the length of the run; the first overflow
stays. What is not known is None. Times are seconds since the epoch on the clock of whoever saw
the event.
"""

from typing import Any

import msgspec

from mpwatch.events import (
    ActivationsSampled,
    GradientsSampled,
    OptimizerDescribed,
    SystemSampled,
)


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step in one phase: `median` within 0.5 %, and the `total` so far."""

    median: float
    total: float


class PhaseBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one phase in bytes: edges when last sampled, and the largest reading so far."""

    start: int
    peak: int
    end: int
    kind: str


class OverflowSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose gradients were not finite, and what was found of it.

    The fields up to `evidence` are those of `OverflowLocated`, with `kind` for its `nonfinite`;
    `verdict` is None where nobody looked.
    """

    step: int
    attempt: int
    rank: int
    optimizer: int
    loss_scale_before: float | None
    loss_scale_after: float | None
    micro_batch: int | None = None
    micro_batch_reason: str = ""
    parameter: str | None = None
    module: str | None = None
    kind: str | None = None
    where: str | None = None
    loss_scale: float | None = None
    headroom_octaves: float | None = None
    parameters_hit: int | None = None
    order: str | None = None
    verdict: str | None = None
    evidence: str = ""
    dumped: str = ""


class DiagnosisSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with the run: `severity` is info, warning or fault."""

    name: str
    severity: str
    step: int
    evidence: str
    advice: str
    rank: int = 0


class PrecisionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `--precision`: `state` is "applied", "refused" or "given_back" (taken off)."""

    mode: str
    state: str
    dtype: str | None = None
    scaler: str | None = None
    reason: str = ""
    after_step: int = 0
    notes: tuple[str, ...] = ()


class ScaleLimitSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The loss scale was at a limit: "low", "floor" or "ceiling"."""

    limit: str
    scale: float
    step: int
    action: str


class ScalingSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The loss scaler that was asked for, and where it came to its limits (the newest ones).

    `replaced` names whose policy it replaced; `refused` says why it is not used, where it is not.
    """

    policy: str | None = None
    replaced: str | None = None
    refused: str = ""
    knobs: dict[str, str | int | float | bool | None] = {}
    expected_skip_rate: float | None = None
    notes: tuple[str, ...] = ()
    limits: tuple[ScaleLimitSeen, ...] = ()
    nonfinite_steps: int = 0


class CommandSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its outcome: "applied", "refused", or None while it is pending.

    `step` is the largest among the ranks that applied it; `reason` the first refusal.
    """

    id: str
    command: str
    args: dict[str, Any]
    by: str
    outcome: str | None
    step: int | None
    reason: str | None


class FaultSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that `--inject` put in."""

    fault: str
    step: int
    rank: int
    micro_batch: int | None
    target: str


class HookSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that failed and switched itself off."""

    hook: str
    error: str
    rank: int


class OptimizerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one optimizer of rank 0, in its order of first use."""

    index: int
    name: str
    parameters: int | None
    steps: int
    applied: int
    skipped: int


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's newest process."""

    rank: int
    attempt: int
    process: int
    pid: int | None
    process_start_time: int | None
    host: str
    bound_at: float | None
    steps: int
    last_event_time: float
    paused: bool
    exited: bool
    error_type: str | None
    error: str | None
    dropped_events: int


class AttemptSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the script; `exit_code` is None while it runs and when nobody saw its end."""

    n: int
    started_at: float
    pid: int | None
    process_start_time: int | None
    ended_at: float | None
    exit_code: int | None
    signal: str | None
    cause: str | None


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `show` prints that comes from events, after event `cursor`.

    Steps, rates, loss and the rest of the numbers follow optimizer 0 of rank 0; `optimizers` and
    `ranks` list the others. `steps` is the newest step's number; where frames were lost it is more
    than `applied + skipped`. `script_window` is what most recent windows have, so that a short
    last one does not change it. `agent_us_per_step` is the mean of the agent's own time, sampling
    included, `agent_us_per_step_median` the median over steps, each as the mean of its half second;
    `agent_sampled_us_per_step` the part of the mean spent on what only sampled steps do.
    `rejected` counts messages and frames that could not be used, by category.
    `record_dropped` events were seen and folded but could not be written, for `record_error`.
    """

    cursor: int = 0
    steps: int = 0
    applied: int = 0
    skipped: int = 0
    superseded: int = 0
    discarded_windows: int = 0
    windows_dropped: int = 0
    script_window: int | None = None
    multiplier: int | None = None
    accumulation_steps: int | None = None
    loss_scale: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    samples_per_s: float | None = None
    step_s: float | None = None
    samples: int | None = None
    tokens: int | None = None
    phase_s: dict[str, PhaseSeconds] = {}
    memory_bytes: dict[str, PhaseBytes] = {}
    precision: PrecisionSeen | None = None
    scaling: ScalingSeen | None = None
    overflows: tuple[OverflowSeen, ...] = ()
    overflow_count: int = 0
    diagnoses: tuple[DiagnosisSeen, ...] = ()
    commands: tuple[CommandSeen, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()
    checkpoints: tuple[dict[str, Any], ...] = ()
    leak: dict[str, Any] = {}
    faults: tuple[FaultSeen, ...] = ()
    dropped_events: int = 0
    missing_frames: int = 0
    hooks_disabled: tuple[HookSeen, ...] = ()
    agent_us_per_step: float | None = None
    agent_us_per_step_median: float | None = None
    agent_sampled_us_per_step: float | None = None
    locate_us: float | None = None
    gradients: GradientsSampled | None = None
    activations: ActivationsSampled | None = None
    optimizers: tuple[OptimizerSeen, ...] = ()
    ranks: tuple[RankSeen, ...] = ()
    attempts: tuple[AttemptSeen, ...] = ()
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
    paused: bool = False
    stalled: bool = False
    silent_s: float | None = None
    stopping: str | None = None
    error_type: str | None = None
    error: str | None = None
    system: SystemSampled | None = None
    first_event_time: float | None = None
    last_event_time: float | None = None
    hubs: int = 0
    rejected: dict[str, int] = {}
    record_dropped: int = 0
    record_error: str | None = None
