"""The fold: what a person reads is what happened, however long, interrupted or odd the run."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch import codec, events, fold_commands, fold_overflows, fold_steps
from mpwatch.codec import HUB_RANK
from mpwatch.events import Event
from mpwatch.fold import Fold
from mpwatch.fold_state import MAX_ENTRIES, MAX_SEGMENTS, StepCounts
from mpwatch.quantiles import LogHistogram
from mpwatch.store import RunView
from tests.core.golden.make import EXAMPLES
from tests.support.hub_runs import frame, step


class Told:
    """A fold that is told events, with cursors and sequence numbers of their own."""

    def __init__(self) -> None:
        self.fold = Fold()
        self.sequence = 0

    def __call__(self, *told: Event, rank: int = 0, attempt: int = 1) -> RunView:
        for event in told:
            envelope = codec.decode_frame(frame(event, self.sequence, rank=rank, attempt=attempt))
            self.sequence += 1
            self.fold.apply(self.sequence, envelope, event)
        return self.fold.view()


@pytest.fixture
def told() -> Told:
    return Told()


def bound(**fields: int) -> events.AgentBound:
    return events.AgentBound(**{"pid": 1, "process_start_time": 2, **fields})


def test_an_empty_run_knows_nothing() -> None:
    view = Fold().view()
    assert (view.steps, view.applied, view.loss, view.script_window) == (0, 0, None, None)
    assert (view.samples, view.samples_per_s, view.agent_us_per_step) == (None, None, None)
    assert view.overflows == view.commands == view.checkpoints == ()


def test_steps_are_counted_as_applied_or_skipped(told: Told) -> None:
    view = told(step(1), step(2, applied=False, overflow=True), step(3))
    assert (view.steps, view.applied, view.skipped) == (3, 2, 1)
    assert [each.step for each in view.overflows] == [2]


def test_totals_follow_the_first_optimizer_of_rank_0(told: Told) -> None:
    told(step(1), step(1, optimizer=1, loss=9.0), step(2))
    view = told(step(1), step(2), step(3), step(4), rank=1)
    assert (view.steps, view.loss) == (2, 0.5)
    assert [(o.index, o.steps) for o in view.optimizers] == [(0, 2), (1, 1)]
    assert [(r.rank, r.steps) for r in view.ranks] == [(0, 2), (1, 4)]


def test_a_short_last_window_does_not_change_the_scripts_window(told: Told) -> None:
    told(*(step(n, script_window=4, multiplier=2) for n in range(1, 20)))
    view = told(step(20, script_window=1, multiplier=2))
    assert (view.script_window, view.multiplier, view.accumulation_steps) == (4, 2, 8)


def test_the_scripts_window_follows_a_script_that_changes_it_for_good(told: Told) -> None:
    told(*(step(n, script_window=4) for n in range(1, 1000)))
    assert told(*(step(n, script_window=8) for n in range(1000, 1030))).script_window == 8


def test_rates_come_from_recent_steps_by_their_own_durations(told: Told) -> None:
    told(*(step(n, duration_s=10.0, samples=1) for n in range(1, 100)))
    view = told(*(step(n, duration_s=0.1, samples=8) for n in range(100, 160)))
    assert view.samples_per_s == pytest.approx(80.0)
    assert view.step_s == pytest.approx(0.1)
    assert view.samples == 99 + 60 * 8


def test_without_known_samples_there_is_no_rate(told: Told) -> None:
    view = told(step(1, samples=None), step(2, samples=None))
    assert (view.samples_per_s, view.samples, view.tokens) == (None, None, None)


def test_steps_that_are_done_again_are_superseded_and_not_counted_twice(told: Told) -> None:
    told(bound(), step(1), step(2, applied=False), step(3), step(4, applied=False, samples=2))
    view = told(bound(pid=5), step(3), attempt=2)
    assert (view.steps, view.applied, view.skipped, view.superseded) == (3, 2, 1, 2)
    assert view.samples == 8 * 3
    view = told(bound(pid=6), step(1), attempt=3)
    assert (view.steps, view.applied, view.skipped, view.superseded) == (1, 1, 0, 5)


def test_a_run_that_resumes_at_a_checkpoint_of_another_starts_behind_it(told: Told) -> None:
    view = told(step(501), step(502))
    assert (view.steps, view.applied, view.superseded) == (502, 2, 0)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=4),
)
def test_counts_agree_with_a_plain_list_through_any_restarts(
    steps: list[tuple[bool, int]], restarts: list[tuple[int, int]]
) -> None:
    counts, kept, done = StepCounts(), {}, 0

    def take(number: int, applied: bool, samples: int) -> None:
        nonlocal kept, done
        kept = {n: value for n, value in kept.items() if n < number}
        kept[number] = (applied, samples)
        done += 1
        counts.add(number, applied, samples, 2 * samples)

    for number, (applied, samples) in enumerate(steps, 1):
        take(number, applied, samples)
    for first, count in restarts:
        begin = min(first, counts.steps + 1)
        for number in range(begin, begin + count):
            take(number, number % 3 > 0, number % 4)
    assert counts.applied == sum(applied for applied, _ in kept.values())
    assert counts.skipped == sum(not applied for applied, _ in kept.values())
    assert counts.samples * 2 == counts.tokens == 2 * sum(samples for _, samples in kept.values())
    assert counts.superseded == done - len(kept)
    assert counts.steps == max(kept)


def test_counts_stay_bounded_where_every_step_differs() -> None:
    counts = StepCounts()
    for number in range(1, 3 * MAX_SEGMENTS):
        counts.add(number, number % 2 == 0, number % 5, 0)
    assert len(counts.segments) <= MAX_SEGMENTS
    assert counts.applied + counts.skipped == counts.steps


@given(st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=300))
def test_a_median_is_within_half_a_percent(seconds: list[float]) -> None:
    histogram = LogHistogram()
    for each in seconds:
        histogram.add(each)
    assert histogram.median() == pytest.approx(statistics.median(seconds), rel=0.005)
    assert histogram.total == pytest.approx(math.fsum(seconds))


def test_phases_give_median_and_total(told: Told) -> None:
    dice = random.Random(3)
    seconds = [dice.lognormvariate(-3, 1) for _ in range(2001)]
    for n, each in enumerate(seconds, 1):
        view = told(step(n, phase_s={"forward": each}))
    assert view.phase_s["forward"].median == pytest.approx(statistics.median(seconds), rel=0.005)
    assert view.phase_s["forward"].total == pytest.approx(sum(seconds))


def test_numbers_that_make_no_sense_are_not_added(told: Told) -> None:
    odd = {"forward": math.nan, "backward": math.inf, "data": -1.0, "other": 0.0}
    view = told(step(1, phase_s=odd, duration_s=math.nan, agent_s=math.inf), step(2, agent_s=1e-5))
    assert [name for name, phase in view.phase_s.items() if phase.total] == []
    assert view.samples_per_s == pytest.approx(800.0)
    assert view.agent_us_per_step == pytest.approx(5.0)


def test_non_finite_losses_and_norms_are_shown(told: Told) -> None:
    view = told(step(1, loss=math.nan, grad_norm=math.inf))
    kept = Fold.load(told.fold.dump()).view()
    assert math.isnan(view.loss or 0)
    assert math.isnan(kept.loss or 0)
    assert view.grad_norm == kept.grad_norm == math.inf


def test_memory_gives_the_last_edges_and_the_largest_peak(told: Told) -> None:
    def sampled(start: int, end: int, peak: int) -> dict[str, events.PhaseMemory]:
        return {"forward": events.PhaseMemory(start_bytes=start, end_bytes=end, peak_bytes=peak)}

    view = told(step(1, memory=sampled(10, 20, 90)), step(2, memory=sampled(11, 21, 50)), step(3))
    found = view.memory_bytes["forward"]
    assert (found.start, found.end, found.peak, found.kind) == (11, 21, 90, "resident")


def test_the_agents_own_time_is_a_mean_per_step_of_all_optimizers(told: Told) -> None:
    view = told(
        step(1, agent_s=30e-6, sampled_s=10e-6),
        step(1, optimizer=1, agent_s=30e-6),
        step(2, agent_s=40e-6),
    )
    assert view.agent_us_per_step == pytest.approx(50.0)
    assert view.agent_sampled_us_per_step == pytest.approx(5.0)


def test_what_the_loop_is_stands_in_the_view(told: Told) -> None:
    view = told(bound(world_size=2, threads=3), EXAMPLES[1])
    assert (view.roots, view.device, view.scaler) == (("GPT",), "cuda:0", "GradScaler")
    assert (view.compiled, view.world_size, view.threads) == (True, 2, 3)
    assert view.described[0].name == "AdamW"


def test_text_from_the_script_is_cleaned(told: Told) -> None:
    evil = "\x1b[2Jgone\x1b]0;title\x07\nnext"
    view = told(
        events.HookDisabled(hook=evil, error=evil),
        events.AgentExited(steps=1, error_type=evil, error=evil),
        events.LoopFound(roots=(evil,), notes=(evil,)),
    )
    for text in (view.hooks_disabled[0].error, view.error, view.roots[0], view.notes[0]):
        assert text == "gone next"


def test_a_pause_ends_with_the_command_the_process_or_the_job(told: Told) -> None:
    assert told(bound(), events.TrainingPaused(step=1)).paused
    assert not told(events.TrainingUnpaused(step=1)).paused
    told(events.TrainingPaused(step=1))
    assert not told(events.AgentExited(steps=1)).paused
    told(bound(pid=9), events.TrainingPaused(step=1))
    assert not told(events.JobExited(exit_code=137), rank=HUB_RANK).paused


def test_attempts_come_from_the_keeper(told: Told) -> None:
    told(events.JobStarted(pid=7, process_start_time=70), rank=HUB_RANK)
    told(bound())
    told(events.JobExited(exit_code=137, signal="SIGKILL"), rank=HUB_RANK)
    view = told(events.JobStarted(pid=8), rank=HUB_RANK, attempt=2)
    assert [(a.n, a.pid, a.exit_code, a.signal) for a in view.attempts] == [
        (1, 7, 137, "SIGKILL"),
        (2, 8, None, None),
    ]


def test_drops_are_summed_over_the_processes_of_a_rank(told: Told) -> None:
    told(bound(), events.EventsDropped(count=3, total=3), events.EventsDropped(count=4, total=7))
    view = told(bound(pid=2, process=1), events.EventsDropped(count=5, total=5))
    assert view.dropped_events == 12
    assert told(bound(pid=3), attempt=2).dropped_events == 12


def test_a_change_of_accumulation_is_known_before_the_next_step(told: Told) -> None:
    told(bound(), step(1, micro_batches=4, script_window=4))
    change = events.AccumulationChanged(step=1, multiplier=2, previous=1)
    view = told(change)
    assert (view.script_window, view.multiplier, view.accumulation_steps) == (4, 2, 8)


def test_an_overflows_norm_does_not_stay(told: Told) -> None:
    told(bound(), step(1, grad_norm=2.0))
    view = told(step(2, applied=False, overflow=True, grad_norm=math.inf), step(3))
    assert view.grad_norm == 2.0


class TestCommands:
    def requested(self, id: str = "a") -> events.CommandRequested:
        return events.CommandRequested(id=id, command="pause", arguments={"stay": True})

    def applied(self, at: int, id: str = "a") -> events.CommandApplied:
        return events.CommandApplied(id=id, command="pause", step=at)

    def test_pending_until_answered(self, told: Told) -> None:
        told(bound())
        seen = told(self.requested(), rank=HUB_RANK).commands[0]
        assert (seen.id, seen.args, seen.by, seen.outcome) == ("a", {"stay": True}, "person", None)
        seen = told(self.applied(4)).commands[0]
        assert (seen.outcome, seen.step, seen.reason) == ("applied", 4, None)

    def test_applied_when_all_ranks_have_at_the_largest_step(self, told: Told) -> None:
        told(bound())
        told(bound(), rank=1)
        told(self.requested(), rank=HUB_RANK)
        assert told(self.applied(5)).commands[0].outcome is None
        seen = told(self.applied(6), rank=1).commands[0]
        assert (seen.outcome, seen.step) == ("applied", 6)

    def test_refused_when_one_rank_does_with_its_reason(self, told: Told) -> None:
        told(bound())
        told(bound(), rank=1)
        told(self.requested(), rank=HUB_RANK)
        told(events.CommandRefused(id="a", command="pause", reason="compiled"), rank=1)
        seen = told(self.applied(5)).commands[0]
        assert (seen.outcome, seen.reason) == ("refused", "compiled")

    def test_a_rank_that_exits_is_not_waited_for(self, told: Told) -> None:
        told(bound())
        told(bound(), rank=1)
        told(self.requested(), rank=HUB_RANK)
        told(self.applied(5))
        seen = told(events.AgentExited(steps=5), rank=1).commands[0]
        assert seen.outcome == "applied"

    def test_the_first_outcome_stands(self, told: Told) -> None:
        told(bound())
        told(self.requested(), rank=HUB_RANK)
        told(self.applied(5))
        late = events.CommandRefused(id="a", command="pause", reason="the job ended")
        assert told(late, rank=HUB_RANK).commands[0].outcome == "applied"
        assert told(self.applied(9)).commands[0].step == 5

    def test_what_an_agent_says_of_an_applied_command_is_kept(self, told: Told) -> None:
        told(bound())
        told(self.requested(), rank=HUB_RANK)
        note = events.CommandApplied(id="a", command="pause", step=3, note="was paused already")
        seen = told(note).commands[0]
        assert (seen.outcome, seen.reason) == ("applied", "was paused already")

    def test_the_hub_speaks_for_ranks_that_cannot(self, told: Told) -> None:
        told(bound())
        told(self.requested(), rank=HUB_RANK)
        gone = events.CommandRefused(id="a", command="pause", reason="the job ended")
        assert told(gone, rank=HUB_RANK).commands[0].reason == "the job ended"


def test_everything_is_bounded(told: Told) -> None:
    for n in range(1, 1500):
        memory = {str(n): events.PhaseMemory(start_bytes=1, end_bytes=1)}
        told(
            step(n, overflow=True, applied=False, phase_s={str(n): 1.0}, memory=memory),
            events.HookDisabled(hook=str(n), error=""),
            events.FaultInjected(fault="nan", step=n),
            events.CommandApplied(id=str(n), command="pause", step=n),
        )
        told(events.JobStarted(pid=n), rank=HUB_RANK, attempt=n)
    view = told.fold.view()
    assert len(view.overflows) == fold_overflows.MAX_OVERFLOWS
    assert len(view.commands) == fold_commands.MAX_COMMANDS
    assert view.commands[-1].id == "1499"
    assert len(view.hooks_disabled) == len(view.attempts) == MAX_ENTRIES
    assert len(view.phase_s) == len(view.memory_bytes) == fold_steps.MAX_PHASES
    assert view.overflow_count == 1499
    assert len(told.fold.dump()) < 500_000


def test_the_state_does_not_grow_with_the_run(told: Told) -> None:
    def go(first: int, last: int) -> int:
        for n in range(first, last):
            told(step(n, phase_s={"forward": 0.01 + 0.001 * (n % 50)}))
        return len(told.fold.dump())

    assert go(2000, 12_000) <= go(1, 2000) + 100


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_a_saved_fold_continues_as_if_nothing_had_happened(dice: random.Random, cut: int) -> None:
    told = []
    for n in range(60):
        event = dice.choice([*EXAMPLES, step(dice.randint(1, 9), applied=dice.random() < 0.7)])
        rank = dice.choice([HUB_RANK, 0, 1])
        told.append((n + 1, codec.decode_frame(frame(event, n, rank=rank)), event))
    whole, half = Fold(), Fold()
    for cursor, envelope, event in told:
        whole.apply(cursor, envelope, event)
    for cursor, envelope, event in told[:cut]:
        half.apply(cursor, envelope, event)
    resumed = Fold.load(half.dump())
    for cursor, envelope, event in told[cut:]:
        resumed.apply(cursor, envelope, event)
    assert repr(resumed.view()) == repr(whole.view())


def test_changes_of_accumulation_are_decisions(told: Told) -> None:
    told(
        step(1),
        events.AccumulationChanged(step=1, multiplier=4, reason="command"),
        step(2, multiplier=4, micro_batches=8, script_window=2),
        events.AccumulationChanged(
            step=2, multiplier=1, previous=4, reason="a closure", refused=True
        ),
        events.AgentExited(steps=2, windows_dropped=3),
    )
    view = told.fold.view()
    assert [(d["step"], d["action"], d["outcome"]) for d in view.decisions] == [
        (1, "accumulate 4", "applied"),
        (2, "accumulate 1", "refused"),
    ]
    assert view.windows_dropped == 3


def test_only_what_says_so_pauses_a_run_or_ends_its_pause(told: Told) -> None:
    assert not told(bound(), step(3), events.Heartbeat()).paused
    assert told(events.TrainingPaused(step=3), events.Heartbeat(paused=False)).paused
    # A step that was done before the pause may be told after it; a later one means it is over.
    assert told(step(3)).paused
    assert not told(step(4)).paused
    assert told(events.TrainingPaused(step=4)).paused
    unpause = events.CommandApplied(id="u", command="unpause", step=4)
    view = told(events.TrainingUnpaused(step=4), unpause, events.Heartbeat())
    assert not view.paused
    assert not view.ranks[0].paused
