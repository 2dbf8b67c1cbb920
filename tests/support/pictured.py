"""A run with fixed events, and the screen on it with a fixed clock: what pictures are taken of."""

import math
from typing import Any

from mpwatch import events
from mpwatch.events import Event, OutputLine, PhaseMemory, StepFinished
from mpwatch.scripted import ScriptedJob
from mpwatch_tui.app import WatchApp
from mpwatch_tui.looks import Looks
from mpwatch_tui.picture import Facts
from mpwatch_tui.watching import Watching
from tests.support.hub_runs import frame
from tests.support.watched_world import MemoryPlaces

# `frame` counts seconds from here for attempt 1.
BEGAN = 1.801e9
NOW = BEGAN + 95.0
FACTS = Facts(
    run_id="20261130-120000-ab12",
    name="char_gpt",
    state="running",
    attempt=1,
    started_at=BEGAN,
)


def stepped(number: int) -> StepFinished:
    """A step of a loss that falls; every fiftieth overflows and halves the scale."""
    overflow = number % 50 == 0
    scale = 65536.0 / 2 ** ((number - 1) // 50)
    return StepFinished(
        step=number,
        applied=not overflow,
        micro_batches=4,
        script_window=2,
        multiplier=2,
        overflow=overflow,
        loss=5.0 * math.exp(-number / 60) + 0.3 * math.sin(number / 3) + 1.0,
        loss_scale_before=scale,
        loss_scale_after=scale / 2 if overflow else scale,
        grad_norm=1.0 + 0.5 * math.cos(number / 7) if number % 10 == 0 else None,
        learning_rates=(3e-4,),
        duration_s=0.08,
        phase_s={"data": 0.002, "forward": 0.02, "backward": 0.045, "optimizer": 0.01},
        samples=32,
        memory={
            "forward": PhaseMemory(
                start_bytes=2 * 10**8, end_bytes=8 * 10**8, peak_bytes=9 * 10**8
            ),
            "backward": PhaseMemory(start_bytes=8 * 10**8, end_bytes=3 * 10**8, peak_bytes=10**9),
        },
    )


def told(steps: int = 120) -> list[bytes]:
    """The frames of the run so far."""
    gpu = events.GpuSampled(
        index=0,
        memory_used_bytes=11 * 10**9,
        memory_total_bytes=16 * 10**9,
        utilization_percent=93.0,
    )
    said: list[Event] = [
        events.AgentBound(pid=4711, process_start_time=None, torch_version="2.13.0"),
        events.LoopFound(
            optimizers=(
                events.OptimizerDescribed(
                    index=0, name="AdamW", parameter_tensors=20, parameters=124672
                ),
            ),
            device="cuda:0",
            scaler="GradScaler",
        ),
        events.SystemSampled(
            job_resident_bytes=2 * 10**9, memory_total_bytes=32 * 10**9, gpus=(gpu,)
        ),
    ]
    for number in range(1, steps + 1):
        said.append(stepped(number))
        if number % 20 == 0:
            text = f"step {number:>4}  loss {said[-1].loss:.4f}"  # type: ignore[attr-defined]
            said.append(OutputLine(text=text, number=number // 20, offset=number))
    return [frame(event, place) for place, event in enumerate(said)]


def screen(
    frames: list[bytes] | None = None,
    looks: Looks = Looks(),  # noqa: B008 (frozen)
    facts: Facts = FACTS,
    connection: str = "live",
    **options: Any,
) -> tuple[WatchApp, MemoryPlaces]:
    """The app on a scripted job; it looks when told to (`app.look`)."""
    places = MemoryPlaces(ScriptedJob(told() if frames is None else frames), facts, connection)
    watching = Watching(places, log_back=None)
    app = WatchApp(watching, looks, threaded=False, clock=lambda: NOW, **options)
    return app, places
