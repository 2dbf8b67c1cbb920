"""The text of `show`: a run as a person wants to read it, plain, in a fixed order. Pure."""

from collections.abc import Iterator

from mpwatch import runs
from mpwatch.cli.formats import duration, moment, number, scale, size, table
from mpwatch.run_state import Evidence
from mpwatch.runs import Run
from mpwatch.store import OverflowSeen, RunView
from mpwatch.vocabulary import PHASES, State, clean_text

ENTRIES_AT_MOST = 10
OVERFLOWS_AT_MOST = 3

Lines = Iterator[tuple[str, str]]


def summary(run: Run, state: State, evidence: Evidence, view: RunView | None) -> str:
    """All that is known, one fact or group of facts per line."""
    lines = [*_outside(run, state, evidence)]
    if view is not None:
        lines += [*_training(view), *_phases(view), *_happenings(view), *_observation(view)]
    return "\n".join(f"{label:<13}{text}".rstrip() for label, text in lines)


def _outside(run: Run, state: State, evidence: Evidence) -> Lines:
    yield "run", run.run_id if run.name is None else f"{run.run_id} ({run.name})"
    attempts = runs.described_attempts(run, evidence)
    last = run.attempts[-1] if run.attempts else None
    words: list[str] = [state]
    if last is not None and last.ended:
        known = last.exit_code is not None
        words.append(f"exit code {last.exit_code}" if known else "exit code unknown")
        cause = attempts[-1]["cause"]
        if cause is not None and cause != f"exit code {last.exit_code}":
            words.append(clean_text(cause, 300))
    elif last is not None and state == "lost":
        words.append("exit code unknown: nobody saw the script end")
    elif last is not None and runs.keeper_is_gone(run):
        words.append("its keeper was killed: the exit code will not be known")
    yield "state", ", ".join(words)
    if state == "never_trained":
        yield from _never_trained(run)
    argv = run.info.get("argv")
    if isinstance(argv, list):
        yield "command", clean_text(" ".join(map(str, argv)), 300)
    yield "started", f"{moment(run.started_at)} on {clean_text(str(run.info.get('host', '?')), 80)}"
    if last is not None and last.started_at and last.ended_at:
        yield "took", duration(last.ended_at - last.started_at)
    yield "directory", clean_text(str(run.directory), 300)
    if not run.info.get("recorded", True):
        yield "", "unrecorded: events are gone with the hub"
    if len(attempts) > 1:
        for entry in attempts:
            cause = "" if entry["cause"] is None else clean_text(entry["cause"], 200)
            yield f"attempt {entry['n']}", f"{moment(entry['started_at'])}  {cause}"


def _never_trained(run: Run) -> Lines:
    """What that state can mean: a script that trained unseen has it too."""
    if not run.info.get("watched", True):
        yield "", "the script ran unwatched: see its stderr"
        return
    reason = runs.unwatched_reason(run)
    meaning = "no process made an optimizer or ran a backward, or the script ran unwatched"
    yield "", meaning if reason else f"{meaning}: see its stderr"
    if reason:
        yield "", f"a process of it ran unwatched: {reason}"


def _training(view: RunView) -> Lines:
    if not view.ranks and not view.steps:
        return
    yield (
        "steps",
        f"{view.steps}: {view.applied} applied, {view.skipped} skipped"
        + (f", {view.superseded} superseded" if view.superseded else ""),
    )
    if view.accumulation_steps is not None:
        yield (
            "window",
            _several(view.accumulation_steps, "micro-batch", "micro-batches")
            + f" ({view.script_window} of the script x {view.multiplier or 1})",
        )
    rates = ", ".join(number(rate) for rate in view.learning_rates[:4])
    yield (
        "loss",
        f"{number(view.loss)}   gradient norm {number(view.grad_norm)}"
        + (f"   learning rate {rates}" if rates else ""),
    )
    if view.loss_scale is not None:
        yield "loss scale", scale(view.loss_scale)
    yield from _precision(view)
    speed = [f"{duration(view.step_s)} per step (median)"] if view.step_s is not None else []
    if view.samples_per_s is not None:
        speed.append(f"{number(view.samples_per_s)} samples/s (mean)")
    if speed:
        yield "speed", ", ".join(speed)
    device = [clean_text(view.device or "cpu", 40)]
    device += [f"torch {clean_text(view.torch_version, 40)}"] if view.torch_version else []
    device += [clean_text(view.scaler, 60)] if view.scaler else []
    device += ["compiled"] if view.compiled else []
    device += [f"{view.world_size} ranks"] if view.world_size > 1 else []
    yield "on", ", ".join(device)
    for optimizer in view.optimizers[1:]:
        name = clean_text(optimizer.name, 60)
        yield f"optimizer {optimizer.index}", f"{name}: {optimizer.steps} steps"


def _precision(view: RunView) -> Lines:
    precision, scaling = view.precision, view.scaling
    if precision is not None:
        dtype = f" {precision.dtype}" if precision.dtype else ""
        scaled = f", scaler {precision.scaler}" if precision.scaler else ""
        reason = f": {precision.reason}" if precision.reason else ""
        yield "precision", f"{precision.mode}{dtype} {precision.state}{scaled}{reason}"
        for note in precision.notes[:ENTRIES_AT_MOST]:
            yield "", note
    if scaling is None:
        return
    if scaling.policy is not None:
        refused = f" not used: {scaling.refused}" if scaling.refused else ""
        instead = f" instead of {scaling.replaced}" if scaling.replaced and not refused else ""
        yield "scaler", f"{scaling.policy}{instead}{refused}"
    for limit in scaling.limits[-3:]:
        yield "", f"scale {scale(limit.scale)}: {limit.limit} at step {limit.step}"
    if scaling.nonfinite_steps:
        yield "not finite", f"gradients of {scaling.nonfinite_steps} steps, without a scaler"


def _phases(view: RunView) -> Lines:
    seen = view.phase_s.keys() | view.memory_bytes.keys()
    names: list[str] = [name for name in PHASES if name in seen]
    if not names:
        return
    rows = [["phase", "median", "total", "memory at start", "peak", "end"]]
    for name in names:
        seconds, held = view.phase_s.get(name), view.memory_bytes.get(name)
        row: list[str] = [name]
        row += (
            ["-", "-"] if seconds is None else [duration(seconds.median), duration(seconds.total)]
        )
        row += ["-"] * 3 if held is None else [size(held.start), size(held.peak), size(held.end)]
        rows.append(row)
    kinds = sorted({clean_text(held.kind, 20) for held in view.memory_bytes.values()})
    label = f"({', '.join(kinds)})" if kinds else ""
    yield "", ""
    for position, line in enumerate(table(rows, numbers=frozenset(range(1, 6))).splitlines()):
        yield label if position == 0 else "", line
    yield "", ""


def _happenings(view: RunView) -> Lines:
    if view.error_type:
        yield "error", clean_text(f"{view.error_type}: {view.error or ''}", 300)
    yield from _overflows(view)
    for diagnosis in view.diagnoses[:ENTRIES_AT_MOST]:
        said = f"{diagnosis.name}: {diagnosis.evidence} (as of step {diagnosis.step})"
        yield clean_text(diagnosis.severity, 12), said
        if diagnosis.advice:
            yield "", f"advice: {diagnosis.advice}"
    for fault in view.faults[-ENTRIES_AT_MOST:]:
        micro = "" if fault.micro_batch is None else f", micro-batch {fault.micro_batch}"
        target = f" in {clean_text(fault.target, 80)}" if fault.target else ""
        yield "injected", f"{clean_text(fault.fault, 20)} at step {fault.step}{micro}{target}"
    for command in view.commands[-ENTRIES_AT_MOST:]:
        outcome = clean_text(command.outcome or "pending", 20)
        words = [clean_text(command.command, 40), outcome]
        words += [f"at step {command.step}"] if command.step is not None else []
        words += [f"({clean_text(command.reason, 200)})"] if command.reason else []
        yield "command", " ".join(words)
    for decision in view.decisions[-ENTRIES_AT_MOST:]:
        text = f"{decision['action']} {decision['outcome']} at step {decision['step']}"
        yield "decision", clean_text(f"{text} ({decision['reason']})", 300)
    if view.windows_dropped:
        windows = _several(view.windows_dropped, "window", "windows")
        yield "dropped", f"{windows} at the end (with an accumulator, micro-batches) made no update"
    if view.discarded_windows:
        windows = _several(view.discarded_windows, "window", "windows")
        yield "discarded", f"{windows} without a step"


def _overflows(view: RunView) -> Lines:
    """The first is told whatever came later: it is usually the cause of the others."""
    if not view.overflow_count or not view.overflows:
        return
    first, *later = view.overflows
    count = max(view.overflow_count, len(view.overflows))
    newest = later[-ENTRIES_AT_MOST:]
    steps = [str(first.step), *_left_out(count - 1 - len(newest))]
    steps += [str(overflow.step) for overflow in newest]
    yield "overflows", f"{count}, at step{'s' if count > 1 else ''} {', '.join(steps)}"
    located = [overflow for overflow in later if overflow.verdict is not None][-OVERFLOWS_AT_MOST:]
    if not located and first.verdict is None:
        return
    yield "", _located(first)
    for left_out in _left_out(count - 1 - len(located)):
        yield "", left_out
    for overflow in located:
        yield "", _located(overflow)


def _left_out(count: int) -> list[str]:
    return [f"... {count} more ..."] if count > 0 else []


def _located(overflow: OverflowSeen) -> str:
    if overflow.verdict is None:
        return f"step {overflow.step}: not located"
    micro = "" if overflow.micro_batch is None else f", micro-batch {overflow.micro_batch}"
    if overflow.micro_batch is None and overflow.micro_batch_reason:
        micro = f", micro-batch unknown ({overflow.micro_batch_reason})"
    module = f" ({overflow.module})" if overflow.module else ""
    return (
        f"step {overflow.step}{micro}: {overflow.kind or 'not finite'} in"
        f" {overflow.parameter}{module}, {overflow.where}; {overflow.verdict}: {overflow.evidence}"
    )


def _cost(view: RunView) -> str:
    """The typical step first: the mean is mostly the first steps', which put hooks on."""
    mean = f"{number(view.agent_us_per_step)} us"
    sampling = view.agent_sampled_us_per_step
    part = "" if sampling is None else f", {number(sampling)} us of it sampling"
    if view.agent_us_per_step_median is None:
        return f"{mean} per step (mean){part}"
    typical = number(view.agent_us_per_step_median)
    return f"{typical} us per step (median); mean {mean} with the first steps in it{part}"


def _observation(view: RunView) -> Lines:
    if view.agent_us_per_step is not None:
        yield "agent", _cost(view)
    if view.locate_us is not None:
        yield "locating", f"{number(view.locate_us)} us per micro-batch"
    for hook in view.hooks_disabled[:ENTRIES_AT_MOST]:
        yield "hook off", f"{clean_text(hook.hook, 60)}: {clean_text(hook.error, 200)}"
    for note in view.notes[:ENTRIES_AT_MOST]:
        yield "note", clean_text(note, 300)
    losses = (
        (view.dropped_events, "event", "dropped by the agent"),
        (view.missing_frames, "frame", "missing"),
        (view.record_dropped, "event", "not recorded"),
        (sum(view.rejected.values()), "message", "rejected"),
    )
    for count, what, fate in losses:
        if count:
            yield "lost", f"{_several(count, what, what + 's')} {fate}"
    if view.record_error:
        yield "record", clean_text(view.record_error, 200)


def _several(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
