"""The tracker against torch: profiler, MemTracker, hand-counted bytes, and compiled code."""

import contextlib
import gc
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from mpwatch_agent.track_phases import track
from mpwatch_agent.track_step import Step
from mpwatch_agent.track_subject import (
    Configuration,
    SharedFakeMode,
    Subject,
    cross_entropy_loss,
    mean_loss,
)
from mpwatch_agent.tracker import ACTIVATIONS, GRADIENTS, OLDER, WEIGHTS, ByteTracker
from tests.support import planner_cases, toy_gpt

MIB = 2**20
LOSSES = {"mean": mean_loss, "cross_entropy": cross_entropy_loss}


def subject_of(architecture: str) -> Subject:
    """The subject of a benchmark architecture."""
    case = planner_cases.ARCHITECTURES[architecture]
    return Subject(
        factory=case.build,
        input_shapes=case.shapes,
        input_dtypes=(getattr(torch, case.dtype),) * len(case.shapes),
        loss=LOSSES[case.loss],
    )


TOY = Subject(
    factory=toy_gpt.build,
    input_shapes=((128,), (128,)),
    input_dtypes=(torch.int64, torch.int64),
    loss=mean_loss,
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small models; more threads only disturb the other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("architecture", "configuration"), planner_cases.QUICK)
def test_prediction_is_within_five_percent_of_the_profiler(
    architecture: str, configuration: planner_cases.Case
) -> None:
    predicted = track(
        subject_of(architecture), Configuration(**planner_cases.fields(configuration)), cpu=True
    )
    truth = planner_cases.measured(architecture, configuration)
    assert predicted.peak_bytes == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "checkpointing", "micro_batch", "accumulation", "mebibytes"),
    [
        ("O0", "none", 4, 4, 99.76),
        ("O0", "full", 1, 16, 60.97),
        ("O1:bf16", "none", 16, 1, 156.21),
    ],
)
def test_toy_gpt_on_fake_tensors(
    precision: str, checkpointing: str, micro_batch: int, accumulation: int, mebibytes: float
) -> None:
    """Cells measured on real tensors with for-loop AdamW."""
    found = track(
        TOY,
        Configuration(
            precision=precision,
            micro_batch=micro_batch,
            accumulation_steps=accumulation,
            checkpointing=checkpointing,
        ),
    )
    assert found.peak_bytes / MIB == pytest.approx(mebibytes, abs=0.006)


def test_toy_gpt_to_the_byte() -> None:
    """134,868,188 bytes by torch's MemTracker, 32 more by the profiler."""
    found = track(TOY, Configuration(micro_batch=8))
    assert found.peak_bytes == 134_868_188
    assert (found.parameters, found.trained, found.largest) == (3_716_608, 3_716_608, 1024 * 256)
    optimizer = found.phases[-1].owners
    assert optimizer[GRADIENTS] == 4 * found.parameters
    assert optimizer["states"] == 8 * found.parameters + 4 * 53  # and a step count per tensor


def _memtracker() -> Any:
    """torch's private tracker, where this version has it."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch.distributed._tools.mem_tracker").MemTracker
    return None


@pytest.mark.skipif(
    _memtracker() is None or torch.__version__ < "2.13" or not torch.distributed.is_available(),
    reason="MemTracker is private to torch: compared with 2.13 and later",
)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("attention", ["math", "sdpa"])
def test_equal_to_memtracker_to_the_byte(checkpointed: bool, attention: str) -> None:
    """Both watch the same step of the same model, one after the other."""
    peaks = []
    for name in ("MemTracker", "ByteTracker"):
        with SharedFakeMode():
            model = toy_gpt.ToyGPT(layers=2, attention=attention, checkpointed=checkpointed)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            ids = torch.zeros((4, 128), dtype=torch.int64)
            tracker = _memtracker()() if name == "MemTracker" else ByteTracker()
            if name == "MemTracker":
                tracker.track_external(model, optimizer, ids)
            else:
                tracker.claim([*model.parameters(), ids], WEIGHTS)
            with tracker:
                model(ids, ids).backward()
                optimizer.step()
        if name == "MemTracker":
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
        else:
            peaks.append(tracker.peak_bytes)
    assert peaks[0] == peaks[1]


def test_books_what_is_born_and_forgets_what_is_freed() -> None:
    tracker = ByteTracker()
    with tracker:
        kept = torch.zeros(1000)
        freed = torch.zeros(500)
        assert tracker.live_bytes == 6000
        del freed
        assert tracker.live_bytes == 4000
        view = kept[:10]
        assert tracker.live_bytes == 4000
    assert tracker.peak_bytes == 6000
    assert tracker.owners == {ACTIVATIONS: 4000}
    del kept
    assert tracker.live_bytes == 4000  # the view still holds the storage
    del view
    assert tracker.live_bytes == 0


def test_a_tensor_older_than_the_tracker_is_not_taken_for_new() -> None:
    old = torch.zeros(256)
    tracker = ByteTracker()
    with tracker:
        view = old.view(16, 16)
        old.add_(1)
    assert tracker.owners == {OLDER: 1024}
    assert view.shape == (16, 16)


def test_claiming_moves_bytes_between_owners() -> None:
    tracker = ByteTracker()
    with tracker:
        tensor = torch.zeros(100)
    tracker.claim([tensor, None], GRADIENTS)
    assert tracker.owners == {GRADIENTS: 400}
    assert tracker.live_bytes == 400


def test_a_dropped_tracker_leaves_nothing_behind() -> None:
    tensor = torch.zeros(10)
    tracker = ByteTracker()
    tracker.claim([tensor], WEIGHTS)
    del tracker
    gc.collect()
    assert tensor.sum() == 0  # freeing it later must not fail for want of a tracker
    del tensor


def test_compiled_code_stays_compiled_during_and_after_tracking() -> None:
    """A plain dispatch mode would switch compiled code off for good."""
    calls, graphs = [], []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)

        def counted(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return counted

    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(4, 4), backend=backend)
    batch = torch.zeros(2, 4)
    compiled(batch)
    with ByteTracker():
        compiled(batch)
    compiled(batch)
    assert (len(calls), len(graphs)) == (3, 1)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    def build() -> nn.Module:
        model = toy_gpt.ToyGPT(layers=1)
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    found = track(
        Subject(
            factory=build,
            input_shapes=((128,), (128,)),
            input_dtypes=(torch.int64, torch.int64),
            loss=mean_loss,
        ),
        Configuration(micro_batch=1),
    )
    assert found.trained == 1024 * 256
    assert found.phases[-1].owners["states"] == 8 * found.trained + 4


def test_weights_and_masters_of_o2() -> None:
    found = track(TOY, Configuration(precision="O2:bf16", micro_batch=1))
    owners = found.phases[-1].owners
    assert owners["weights"] == 2 * found.parameters
    assert owners["master"] == 4 * found.parameters
    assert owners["gradients"] == 2 * found.parameters


def test_layers_cloned_by_deepcopy_share_the_fake_mode() -> None:
    """nn.Transformer copies its layers; a copied mode sent attention down another path."""
    with SharedFakeMode() as mode:
        step = Step(subject_of("encoder-decoder"), Configuration())
    assert {id(p.fake_mode) for p in step.module.parameters()} == {id(mode)}
