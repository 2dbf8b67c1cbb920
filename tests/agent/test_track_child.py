"""The tracking child: every way a user's factory misbehaves ends in one line with the cause."""

import argparse
import io
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpwatch.cli import plan, plan_tracking
from mpwatch.cli.plan_tracking import Target, track
from mpwatch.errors import UsageError
from mpwatch.planner.calibration import RunConfiguration
from mpwatch_agent.track_child import Child, Request
from mpwatch_agent.track_subject import Configuration

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "tests" / "support" / "toy_modules.py"
ONE = RunConfiguration(
    precision="O0", micro_batch=2, accumulation_steps=1, checkpointing="none", optimizer="sgd"
)


@pytest.fixture
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import the packages from this checkout, installed or not."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'agent'}")


def answers(factory: str, shape: tuple[int, ...] = (16,), **fields: Any) -> list[dict[str, Any]]:
    """What the child says, run in this process."""
    out = io.BytesIO()
    request = Request(
        model=f"{MODULES}:{factory}",
        input_shapes=[shape],
        input_dtypes=["float32"],
        loss="mean",
        configurations=[Configuration(micro_batch=2, optimizer="sgd", **fields)],
        limit_bytes=8 * 10**9,
    )
    Child(request, out).run()
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("raise_an_error", r"RuntimeError: weights file not found \(toy_modules.py:\d+\)"),
        ("return_a_string", "TypeError: the factory returned str, not a Module"),
        ("end_the_process", r"SystemExit: 0 \(toy_modules.py:\d+\)"),
        ("train_nothing", "ValueError: the module has no parameter that requires a gradient"),
        ("nothing_of_that_name", "toy_modules.py has no function 'nothing_of_that_name'"),
    ],
)
def test_cause_is_one_line(factory: str, cause: str) -> None:
    (failure,) = answers(factory)
    assert failure["kind"] == "failed"
    assert failure["configuration"] is None
    assert re.search(cause, failure["cause"])
    assert "\n" not in failure["cause"]


@pytest.mark.parametrize("factory", ["build_double", "build_half_recurrent", "build_tied_half"])
@pytest.mark.parametrize("precision", ["O0", "O1:bf16", "O2:bf16"])
def test_a_factory_may_convert_its_module(factory: str, precision: str) -> None:
    """`to(dtype)` cannot swap fake tensors; the plan's precision decides what weights are."""
    answer, *_ = answers(factory, precision=precision)
    assert answer["kind"] == "tracked"
    tracked = answer["tracked"]
    width = 2 if precision.startswith("O2") else 4
    assert tracked["phases"][0]["owners"]["weights"] == width * tracked["parameters"]


def test_batch_norm_over_one_sample_says_what_to_do() -> None:
    out = io.BytesIO()
    request = Request(
        model=f"{MODULES}:build_normed",
        input_shapes=[(16,)],
        input_dtypes=["float32"],
        loss="mean",
        configurations=[Configuration(micro_batch=1, optimizer="sgd")],
        limit_bytes=8 * 10**9,
    )
    Child(request, out).run()
    assert "give --min-micro-batch 2" in json.loads(out.getvalue())["cause"]


def test_blocks_and_what_is_outside_of_them_are_counted() -> None:
    answer, *_ = answers("build_perceptron", shape=(256,))
    tracked = answer["tracked"]
    assert tracked["block_parameters"] == 512 * 512 + 512
    assert tracked["root_parameters"] == (256 * 512 + 512) + (512 * 10 + 10)


def test_a_process_that_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tracking, "_exchange", lambda *_: (b"", b"", 0))
    target = Target(model="a.py:f", input_shapes=((1,),), input_dtypes=("float32",))
    assert track(target, [ONE]).cause == "its process ended early (exit code 0)"


@pytest.mark.usefixtures("found_by_children")
def test_a_factory_that_leaves_processes_behind_is_not_waited_for() -> None:
    target = Target(
        model=f"{MODULES}:leave_a_process_behind",
        input_shapes=((16,),),
        input_dtypes=("float32",),
        timeout_s=60.0,
    )
    begin = time.monotonic()
    found = track(target, [ONE])
    assert found.cause is None
    assert len(found.runs) == 1
    assert time.monotonic() - begin < 50


def test_missing_file_and_wrong_shape() -> None:
    request = Request(
        model="nowhere.py:build",
        input_shapes=[(16,)],
        input_dtypes=["float32"],
        loss="mean",
        configurations=[],
        limit_bytes=1,
    )
    out = io.BytesIO()
    Child(request, out).run()
    assert "names no file" in json.loads(out.getvalue())["cause"]
    (failure,) = answers("build_perceptron", shape=(7,))
    assert failure["kind"] == "failed"


def test_checkpointing_without_blocks_does_not_stop_the_others() -> None:
    out = io.BytesIO()
    request = Request(
        model=f"{MODULES}:build_from_numpy",
        input_shapes=[(4,)],
        input_dtypes=["float32"],
        loss="mean",
        configurations=[
            Configuration(checkpointing="full", optimizer="sgd"),
            Configuration(optimizer="sgd"),
        ],
        limit_bytes=8 * 10**9,
    )
    Child(request, out).run()
    kinds = [json.loads(line)["kind"] for line in out.getvalue().splitlines()]
    assert kinds.count("failed") == 1
    assert kinds.count("tracked") == 1


def test_data_dependent_control_flow_falls_back_on_real_tensors() -> None:
    (answer,) = answers("build_branching")
    assert answer["kind"] == "tracked"
    assert answer["real"] is True
    assert answer["tracked"]["parameters"] == 16 * 16 + 16


def test_flops_are_six_per_parameter_and_sample() -> None:
    work = next(a for a in answers("build_perceptron", shape=(256,)) if a["kind"] == "work")
    matrices = 256 * 512 + 4 * 512 * 512 + 512 * 10
    # The first layer needs no gradient of its input.
    assert work["flops_per_sample"] == 6 * matrices - 2 * 256 * 512


@pytest.mark.usefixtures("found_by_children")
def test_a_factory_that_never_returns_is_ended_at_the_deadline() -> None:
    target = Target(
        model=f"{MODULES}:never_return",
        input_shapes=((1,),),
        input_dtypes=("float32",),
        timeout_s=6.0,
    )
    found = track(target, [ONE])
    assert found.runs == []
    assert found.cause == "not finished after 6 s (--track-timeout)"


@pytest.mark.usefixtures("found_by_children")
def test_a_factory_that_takes_a_terabyte_is_refused_it() -> None:
    target = Target(
        model=f"{MODULES}:allocate_a_terabyte", input_shapes=((1,),), input_dtypes=("float32",)
    )
    found = track(target, [ONE])
    assert found.cause is not None
    assert "Unable to allocate 931. GiB" in found.cause


@pytest.mark.usefixtures("found_by_children")
def test_gpt_of_1_4_billion_in_five_seconds_and_500_megabytes() -> None:
    """On an idle core; twice that passes here, since neighbours on the core stretch even
    processor time. `benchmarks/planner.py` holds it to the budget itself."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.large_gpt"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    backward, seconds, kilobytes = child.stdout.split()
    assert int(backward) / 2**30 == pytest.approx(22.85, rel=0.005)
    assert float(seconds) <= 2 * 5.0
    assert int(kilobytes) <= 500_000


def verb(options: str) -> int:
    """The plan verb with these options."""
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.run(parser.parse_args(options.split()))


@pytest.mark.usefixtures("found_by_children")
def test_the_verb_tracks_a_module_and_emits_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    options = "--input-shape 32 --input-dtype int64 --loss cross_entropy --precision O1 --batch 2"
    shape = "--layers 3 --hidden 128 --heads 4 --seq 32 --vocab 512"
    model = f"--model {MODULES}:build_language --cpu --card 2GB {shape}"
    assert verb(f"{model} {options} --json --emit {path} --family exact") == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    chosen = answer["recommended"]
    assert chosen["labels"]["peak_bytes"] == "tracked"
    assert chosen["attention"] == "as written"
    assert answer["inputs"]["model"]["parameters"] == 726_400  # counted by hand from the layers
    assert tomllib.loads(path.read_text())["plan"]["peak_bytes"] == chosen["peak_bytes"]
    assert tomllib.loads(path.read_text())["plan"]["label"] == "tracked"
    assert "estimated from the shape" not in captured.err  # within 10 % of each other


@pytest.mark.usefixtures("found_by_children")
def test_the_verb_falls_back_on_the_analytic_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"--model {MODULES}:raise_an_error --input-shape 32 --card 24GB --batch 8"
    assert verb(f"{options} --params 100M --json") == 0
    captured = capsys.readouterr()
    assert "weights file not found" in captured.err
    assert "falling back on the analytic estimate" in captured.err
    assert json.loads(captured.out)["recommended"]["labels"]["peak_bytes"] == "estimated"
    monkeypatch.setattr(plan_tracking, "_exchange", lambda *_: (b"", b"last words", 5))
    with pytest.raises(UsageError, match="exit code 5: last words; there is no estimate to fall"):
        verb(options)
