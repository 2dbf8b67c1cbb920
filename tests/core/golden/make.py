"""Makes `frames.json`: one encoded frame per kind of event, every field filled.

Run on purpose only, when the protocol changes, and say why in the commit:
`python -m tests.core.golden.make`
"""

import json
import math
from pathlib import Path

from mpwatch import codec, events
from mpwatch.events import Event

FILE = Path(__file__).with_name("frames.json")

EXAMPLES: tuple[Event, ...] = (
    events.AgentBound(
        pid=4242,
        process_start_time=123456,
        process=1,
        world_size=2,
        host="node",
        python_version="3.11.7",
        torch_version="2.13.0",
        threads=8,
    ),
    events.LoopFound(
        optimizers=(
            events.OptimizerDescribed(
                index=0, name="AdamW", parameter_tensors=12, parameters=85_000
            ),
        ),
        roots=("GPT",),
        device="cuda:0",
        scaler="GradScaler",
        compiled=True,
        notes=("closure left alone",),
    ),
    events.StepFinished(
        step=7,
        applied=False,
        optimizer=1,
        micro_batches=4,
        script_window=2,
        multiplier=2,
        overflow=True,
        losses=(1.5, math.inf, None),
        loss_divisor=4.0,
        loss=math.nan,
        loss_scale_before=65536.0,
        loss_scale_after=32768.0,
        grad_norm=-math.inf,
        learning_rates=(1e-3, 1e-4),
        duration_s=0.25,
        phase_s={"forward": 0.1, "backward": 0.15},
        samples=32,
        tokens=4096,
        memory={"forward": events.PhaseMemory(start_bytes=1, end_bytes=2, peak_bytes=3)},
        agent_s=1e-4,
        sampled_s=5e-5,
        locate_us=85.0,
    ),
    events.WindowDiscarded(optimizer=1, micro_batches=3, after_step=7),
    events.HookDisabled(hook="backward", error="ValueError: x"),
    events.EventsDropped(count=3, total=9),
    events.CommandApplied(id="a1", command="pause", step=7, note="n"),
    events.CommandRefused(id="a2", command="set_sampling", reason="no", step=7),
    events.TrainingPaused(step=7),
    events.TrainingUnpaused(step=7, reason="no hub for 60 s"),
    events.Heartbeat(paused=False),
    events.PrecisionApplied(
        mode="O1",
        dtype="fp16",
        scaler="histogram",
        loss_scale=65536.0,
        roots=("Net",),
        notes=("n",),
    ),
    events.PrecisionRefused(mode="O2", reason="compiled", after_step=7, was_on=True),
    events.ScalerReplaced(
        policy="doubling",
        replaced="GradScaler",
        loss_scale=1024.0,
        after_step=7,
        knobs={"growth_interval": 1, "interval_unit": "windows", "floor": None},
        expected_skip_rate=0.5,
        notes=("n",),
    ),
    events.ScalerRefused(policy="torch", reason="no GradScaler", after_step=2),
    events.ScaleLimitReached(limit="floor", scale=1.0, step=7, action="stop", overflows=16),
    events.NonfiniteFound(step=7, action="skip", optimizer=1),
    events.FaultInjected(fault="overflow", step=7, micro_batch=3, target="head.weight"),
    events.OverflowLocated(
        step=7,
        optimizer=1,
        micro_batch=2,
        micro_batch_reason="r",
        parameter="head.weight",
        module="head",
        nonfinite="inf",
        where="forward",
        loss_scale=65536.0,
        headroom_octaves=2.5,
        parameters_hit=1,
        parameters_looked_at=12,
        order="registration",
        verdict="bad_batch",
        evidence="e",
        dumped="crash/step-7",
    ),
    events.DiagnosisRaised(
        name="weights_are_fp16", severity="fault", step=7, evidence="e", advice="a"
    ),
    events.GradientsSampled(
        step=7,
        layers=(
            events.LayerGradients(
                name="head",
                values=64,
                looked_at=32,
                max_abs=0.5,
                zeros=0.25,
                non_finite=0.125,
                error=0.01,
                first_exponent=-20,
                counts=(1, 2, 3),
                shares=(
                    events.FormatShares(format="fp16", zeroed=0.1, subnormal=0.2, overflowed=0.3),
                ),
                update_median=1e-3,
                update_small=0.5,
                update_small_fp16=0.25,
            ),
        ),
        loss_scale=1024.0,
        exact=True,
        stored_as="float32",
        best_octave=6,
        limit_octave=16,
        forecast=(events.ScaleForecast(octaves=-1, zeroed=0.1, subnormal=0.2, overflowed=0.3),),
        note="n",
    ),
    events.ActivationsSampled(
        step=7,
        modules=(
            events.ModuleHeadroom(name="head", max_abs=10.0, octaves=12.7, trend_octaves=0.5),
        ),
    ),
    events.AgentStopping(step=7, reason="max_steps"),
    events.AgentExited(steps=7, error_type="RuntimeError", error="boom", windows_open=1),
    events.HubStarted(pid=77, resumed_after=1000),
    events.JobStarted(pid=4242, process_start_time=123456),
    events.JobExited(exit_code=137, signal="SIGKILL", cause="killed"),
    events.JobStalled(silent_s=31.5, last_step=7),
    events.JobRecovered(silent_s=40.0),
    events.FramesMissing(count=5, of_rank=1),
    events.CommandRequested(
        id="a3", command="set_sampling", by="controller", arguments={"memory_every": 5}
    ),
    events.SystemSampled(
        cpu_percent=12.5,
        memory_used_bytes=1,
        memory_total_bytes=2,
        job_cpu_percent=99.0,
        job_resident_bytes=3,
        job_processes=4,
        disk_free_bytes=5,
        gpus=(
            events.GpuSampled(
                index=0,
                name="T4",
                memory_used_bytes=6,
                memory_total_bytes=7,
                utilization_percent=80.0,
                temperature_c=60.0,
                power_w=70.0,
            ),
        ),
    ),
    events.OutputLine(text="loss 1.5", number=3, offset=40, left_out=2, unfinished=True),
    events.AccumulationChanged(step=5, multiplier=2, previous=4, reason="command", refused=True),
)


def encoded(event: Event, sequence: int) -> bytes:
    """`event` in a frame that is the same each time."""
    return codec.encode_frame(
        event, run="golden", attempt=2, rank=1, sequence=sequence, time=1800000000.125
    )


if __name__ == "__main__":
    lines = {
        str(type(event).__struct_config__.tag): encoded(event, sequence).hex()
        for sequence, event in enumerate(EXAMPLES)
    }
    FILE.write_text(json.dumps(lines, indent=1) + "\n", "utf-8")
