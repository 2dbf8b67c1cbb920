"""Events about the numbers of training: precision, loss scale, overflows, gradients, windows.

Part of `mpwatch.events`, which everybody imports them from; the same rules hold.
"""

import msgspec

from mpwatch.event_base import Event


class PrecisionApplied(Event, frozen=True, kw_only=True):
    """From the first backward on the loop runs in another precision, as `--precision` asked.

    `scaler` names the loss scaler's policy, None where nothing is scaled (bf16) or the script
    scales by itself; `notes` says what is left out and what the mode costs.
    """

    mode: str
    dtype: str
    scaler: str | None = None
    loss_scale: float | None = None
    roots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class PrecisionRefused(Event, frozen=True, kw_only=True):
    """The precision asked for was not put on, or (`was_on`) was taken off again, and why."""

    mode: str
    reason: str
    after_step: int = 0
    was_on: bool = False


class ScalerReplaced(Event, frozen=True, kw_only=True):
    """A scaler's policy is now `policy`, with `knobs` as they are in force.

    `replaced` names whose it was: the script's GradScaler, or the policy before.
    """

    policy: str
    replaced: str
    loss_scale: float
    after_step: int = 0
    knobs: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    expected_skip_rate: float | None = None
    notes: tuple[str, ...] = ()


class ScalerRefused(Event, frozen=True, kw_only=True):
    """The scaler asked for has nothing to scale, or was taken off again, and why."""

    policy: str
    reason: str
    after_step: int = 0


class ScaleLimitReached(Event, frozen=True, kw_only=True):
    """The loss scale came to a limit: "low" (1, or a little above its floor), "floor", "ceiling".

    `action` is what was done about it: "warn" or "stop". `overflows` counts those so far.
    """

    limit: str
    scale: float
    step: int
    action: str = "warn"
    overflows: int = 0


class NonfiniteFound(Event, frozen=True, kw_only=True):
    """Gradients of `step` were not finite where no loss scaler looks; `action` was done."""

    step: int
    action: str
    optimizer: int = 0


class OverflowLocated(Event, frozen=True, kw_only=True):
    """Where the gradients of a step were not finite, and what that speaks for.

    `parameter` is the first in backward order, `module` the one that owns it or, where the forward
    made it, the one whose inputs were finite and whose output was not. `micro_batch` counts from 0
    within the window; None with `micro_batch_reason`. `nonfinite` is "inf" or "nan", None where a
    clip had turned the one into the other. `where` is "forward" or "backward". `verdict` is one of
    scale_too_high, bad_batch, forward, diverging, carried_over, unknown. `headroom_octaves` is how
    far the largest finite gradient, scaled, lay below fp16's largest value. `order` says how the
    first in backward order is known: "graph" or "registration".
    """

    step: int
    optimizer: int = 0
    micro_batch: int | None = None
    micro_batch_reason: str = ""
    parameter: str | None = None
    module: str | None = None
    nonfinite: str | None = None
    where: str = "backward"
    loss_scale: float | None = None
    headroom_octaves: float | None = None
    parameters_hit: int = 0
    parameters_looked_at: int = 0
    order: str = "graph"
    verdict: str = "unknown"
    evidence: str = ""
    dumped: str = ""


class DiagnosisRaised(Event, frozen=True, kw_only=True):
    """Something is wrong with the run, in words: `severity` is info, warning or fault.

    A diagnosis of the same `name` replaces an earlier one: it is told again when it grows.
    """

    name: str
    severity: str
    step: int
    evidence: str
    advice: str = ""


class FormatShares(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shares of all gradients that a number format would lose: zeroed, sub-normal, overflowed.

    Each may be off by its error, where only a sample was counted.
    """

    format: str
    zeroed: float = 0.0
    subnormal: float = 0.0
    overflowed: float = 0.0
    zeroed_error: float = 0.0
    subnormal_error: float = 0.0
    overflowed_error: float = 0.0


class ScaleForecast(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What fp16 would lose at the scale of now times 2^`octaves`."""

    octaves: int
    zeroed: float = 0.0
    subnormal: float = 0.0
    overflowed: float = 0.0


class LayerGradients(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The gradients of one layer, or of a group of layers, unscaled and before clipping.

    `counts[i]` values have the binary exponent `first_exponent` + i. `looked_at` of `values` were
    counted, and `max_abs` is of all; `error` is how far a share may be off at most because of that
    (0: all were counted).
    `shares` are of the gradients times the loss scale. `update_small` is the share of weights whose
    last update was below 2^-8 of the weight, which bf16 weights would lose, and `update_small_fp16`
    below 2^-11; `update_median` the median of |dw|/|w|. None where no update was seen.
    """

    name: str
    values: int
    looked_at: int
    max_abs: float = 0.0
    zeros: float = 0.0
    non_finite: float = 0.0
    error: float = 0.0
    first_exponent: int = 0
    counts: tuple[int, ...] = ()
    shares: tuple[FormatShares, ...] = ()
    update_median: float | None = None
    update_small: float | None = None
    update_small_fp16: float | None = None


class GradientsSampled(Event, frozen=True, kw_only=True):
    """The distribution of a step's gradients by layer; the first entry is all of them together.

    `best_octave` is the smallest k at which scale 2^k zeroes at most a thousandth of all gradients
    in fp16 and keeps a headroom of 4, `limit_octave` the largest with that headroom; None where no
    scale does. `stored_as` names the dtypes of the gradients; `note` says what limits all this.
    """

    step: int
    layers: tuple[LayerGradients, ...] = ()
    loss_scale: float | None = None
    exact: bool = False
    stored_as: str = ""
    best_octave: int | None = None
    limit_octave: int | None = None
    forecast: tuple[ScaleForecast, ...] = ()
    note: str = ""


class ModuleHeadroom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The largest magnitude in a module's output, and how much it grew per sample since the first.

    `octaves` lie between it and the largest value of fp16 (negative: beyond it).
    """

    name: str
    max_abs: float
    octaves: float | None = None
    trend_octaves: float | None = None


class ActivationsSampled(Event, frozen=True, kw_only=True):
    """Activation headroom by module, the narrowest first."""

    step: int
    modules: tuple[ModuleHeadroom, ...] = ()


class AccumulationChanged(Event, frozen=True, kw_only=True):
    """From `step` finished steps on, `multiplier` windows of the script make one.

    `reason` is "start", "command", or why accumulation was refused and the multiplier is 1.
    """

    step: int
    multiplier: int
    previous: int = 1
    reason: str = ""
    refused: bool = False
