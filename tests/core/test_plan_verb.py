"""The `plan` verb: exit codes, documented output, and one line for every unusable question."""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mpwatch.cli import plan
from mpwatch.cli.plan_table import cells
from mpwatch.errors import UsageError
from mpwatch.planner.cards import find_card
from mpwatch.planner.model import PlainModel
from mpwatch.planner.plans import Budget, Limits
from mpwatch.planner.survey import survey

ROOT = Path(__file__).parents[2]
SHAPE = "--layers 24 --hidden 2048 --heads 16 --seq 2048 --vocab 50304"
PLAN_FIELDS = {
    "family", "precision", "optimizer", "micro_batch", "accumulation_steps", "checkpointing",
    "attention", "sharding", "devices", "peak_bytes", "fits", "binding", "time_per_sample_s",
    "labels",
}  # fmt: skip


def run(options: str) -> int:
    """The verb with these options; UsageError passes through."""
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.run(parser.parse_args(options.split()))


def test_a_t4_and_1_3_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--card T4 --params 1.3B {SHAPE} --batch 64") == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if " exact " in line]
    assert rows
    assert all(" no " in row and " static " in row for row in rows)  # 16 bytes each: 20.8 GB
    assert "bf16" not in printed
    assert "changes the learning problem" in printed
    assert "(estimated)" in printed


def test_a_narrow_terminal_does_without_the_least_needed_columns() -> None:
    card = find_card("T4")
    answer = survey(
        PlainModel(parameters=10**9), card, Budget(memory_bytes=card.memory_bytes), Limits(batch=8)
    )
    full, narrow = cells(answer.plans), cells(answer.plans, 80)
    assert all(sum(len(cell) + 2 for cell in row) <= 80 for row in narrow)
    assert {"family", "precision", "b", "N", "peak", "fits", "binding"} <= set(narrow[0])
    assert len(full[0]) == 15
    assert len(narrow) == len(full) == len(answer.plans) + 1


def test_exit_code_1_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--params 7.5B --layers 32 --hidden 4416 --heads 32 --seq 2048 --vocab 50304"
    assert run(f"--card 80GB {options} --batch 64 --family exact") == 1
    printed = capsys.readouterr().out
    assert "nothing fits" in printed
    assert "accumulation cannot help" in printed


def test_documented_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "samples" / "llama_7b_config.json"
    assert run(f"--card 24GB --hf-config {config} --batch 128 --json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["inputs"]["model"]["parameters"] == 6_738_415_616  # as published for LLaMA 7B
    assert set(answer["recommended"]) >= PLAN_FIELDS
    assert all(set(row) >= PLAN_FIELDS for row in answer["plans"])
    assert answer["recommended"] in answer["plans"]
    assert answer["recommended"]["time_per_sample_s"] is None  # a size has no speed
    kinds = {label for row in answer["plans"] for label in row["labels"].values()}
    assert kinds <= {"measured", "tracked", "estimated", "unknown"}
    front = answer["plans"][: answer["front"]]
    assert front
    assert all(row["fits"] for row in front)
    peaks = [row["peak_bytes"] for row in front]
    assert peaks == sorted(peaks)


def test_emitted_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert run(f"--card H100 {SHAPE} --batch 64 --emit {path} --json") == 0
    chosen = json.loads(capsys.readouterr().out)["recommended"]
    table = tomllib.loads(path.read_text())["plan"]
    assert table.pop("label") == "estimated"
    assert table == {name: chosen[name] for name in table}
    assert table["micro_batch"] * table["accumulation_steps"] * table["devices"] == 64


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (f"--card T5 --params 1B {SHAPE} --batch 8", "unknown card 'T5'"),
        (f"--card=-5GB {SHAPE} --batch 8", "card '-5GB' is out of range"),
        (f"--card 0GB {SHAPE} --batch 8", "out of range"),
        (f"--card 16 {SHAPE} --batch 8", "no unit"),
        (f"--card T4 {SHAPE} --batch 0", "--batch 0 is out of range"),
        (f"--card T4 {SHAPE} --batch 99999999999", "--batch 99999999999 is out of range"),
        (f"--card T4 {SHAPE} --batch 8 --devices 0", "--devices 0"),
        (f"--card T4 {SHAPE} --batch 8 --max-accumulation 0", "--max-accumulation 0"),
        (f"--card T4 {SHAPE} --batch 8 --min-micro-batch 100", "no split of batch 8"),
        (f"--card T4 {SHAPE} --batch 8 --precision O1:bf16", "T4 has no fast bf16"),
        (f"--card T4 {SHAPE} --batch 8 --precision O9", "unknown precision 'O9"),
        (f"--card T4 {SHAPE} --batch 8 --optimizer lion", "unknown optimizer 'lion'"),
        (f"--card T4 --params 90B {SHAPE} --batch 8", "contradicts the shape"),
        (f"--card T4 --params nine {SHAPE} --batch 8", "--params 'nine'"),
        (f"--card T4 --params 1e30 {SHAPE} --batch 8", "out of range"),
        ("--card T4 --layers 2 --batch 8", "missing --hidden, --heads, --seq, --vocab"),
        ("--card T4 --batch 8", "the model is not described"),
        ("--card T4 --hf-config nowhere.json --batch 8", "cannot read nowhere.json"),
        (f"{SHAPE} --batch 8", "no device"),
        (f"--card T4 {SHAPE}", "no batch"),
        (f"--card T4 {SHAPE} --batch 8 --noise-scale 9..3", "rising order"),
        (f"--card T4 {SHAPE} --batch 8 --verify", "--verify needs a script"),
        (f"--card T4 {SHAPE} --batch 8 --lora-rank 4096", "exceeds the width 2048"),
        ("--card T4 --model a.py:f --input-shape 3 --batch 8 --track-timeout nan", "timeout nan"),
        (f"--card T4 {SHAPE} --batch 8 --json --plot", "leave out --json"),
        (f"--card T4 {SHAPE} --batch 8 --verify nowhere.py", "no script nowhere.py"),
        (f"--card T4 {SHAPE} --batch 8 --verify-steps 0 --verify a.py", "--verify-steps 0"),
        (f"--card T4 {SHAPE} --batch 8 --max-accumulation 9999999", "1 to 65536"),
        (f"--card T4 {SHAPE} --batch 8 --picture a.pdf", r"\.png or \.svg"),
        ("--card T4 --model a.py:f --batch 8", "--input-shape"),
        ("--card T4 --model a.py:f --input-shape 3,-2 --batch 8", "'3,-2' is not understood"),
        ("--card T4 --model a.py:f --input-shape \u00b2 --batch 8", "is not understood"),
        ("--card T4 --model a.py:f --input-shape 3e2 --batch 8", "is not understood"),
        (f"--card T4 --model a.py:f --input-shape {'9' * 30} --batch 8", "is out of range"),
        (f"--card \u0663GB {SHAPE} --batch 8", "is not understood"),
        (f"--card 0 {SHAPE} --batch 8", "has no unit"),
        (f"--card T4 {SHAPE} --batch 8 --seq 0", "--seq 0"),
        ("--card T4 --layers -3 --hidden 8 --heads 2 --seq 8 --vocab 9 --batch 8", "--layers -3"),
        ("--card T4 --layers 3 --hidden 9 --heads 2 --seq 8 --vocab 9 --batch 8", "no multiple"),
    ],
)
def test_unusable_questions_are_answered_in_one_line(options: str, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as raised:
        run(options)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_config_with_absurd_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}
    for name, value in (("num_key_value_heads", -2), ("intermediate_size", 10**12)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**sizes, "n_ctx": 8, name: value}))
        with pytest.raises(UsageError, match="out of range"):
            run(f"--card T4 --hf-config {path} --batch 8")


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "{", "", "\ufeff{", "[" * 100_000, '{"hidden_size": "wide"}', '{"hidden_size": 8}'],
    ids=lambda text: text[:12],
)
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        run(f"--card T4 --hf-config {path} --batch 8")


def test_a_batch_that_cannot_be_made_exactly_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--card H100 {SHAPE} --batch 67 --devices 8"
    assert run(options) == 0
    assert " 64 (-3) " in capsys.readouterr().out
    run(f"{options} --json")
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert {row["batch_deviation"] for row in rows} == {-3}
    for row in rows:
        made = row["micro_batch"] * row["accumulation_steps"] * row["devices"]
        assert made - 67 == row["batch_deviation"]


@pytest.mark.parametrize("extra", ["", "--space"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures(extra: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{suffix}"
    assert run(f"--card T4 --params 1.3B {SHAPE} --batch 64 --picture {path} {extra}") == 0
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_rules_of_thumb_stand_beside_the_honest_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(f"--card T4 --params 1.3B {SHAPE} --batch 64 --preset simple-tree") == 0
    printed = capsys.readouterr().out
    assert "simple-tree: mixed, N=2" in printed
    assert "defect:" in printed
    assert "honest estimate:" in printed
    run(f"--card T4 --params 1.3B {SHAPE} --batch 64 --preset param-fraction")
    assert "not meaningful" in capsys.readouterr().out


def test_plot_and_space_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--card T4 --params 1.3B {SHAPE} --batch 64 --plot --space") == 0
    printed = capsys.readouterr().out
    assert "#" in printed
    assert printed.isascii()
    lines = [line for line in printed.splitlines() if line.startswith("O3:fp16 ")]
    assert lines
    assert "N=64" in printed


def test_seventy_billion_parameters_in_a_second_without_torch() -> None:
    """Processor time of the whole process; torch must not even be imported."""
    script = (
        "import argparse, sys, time\n"
        "from mpwatch.cli import plan\n"
        "parser = argparse.ArgumentParser()\n"
        "plan.add_arguments(parser)\n"
        "code = plan.run(parser.parse_args(sys.argv[1:]))\n"
        "print(code, time.process_time(), 'torch' in sys.modules, 'matplotlib' in sys.modules)\n"
    )
    options = (
        "--card H100 --layers 80 --hidden 8192 --heads 64 --seq 4096 --vocab 32000"
        " --batch 1024 --devices 64"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, *options.split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    code, seconds, torch, matplotlib = child.stdout.splitlines()[-1].split()
    assert (code, torch, matplotlib) == ("0", "False", "False")
    assert float(seconds) <= 1.0


def test_a_level_alone_takes_the_format_that_the_card_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(f"--card T4 {SHAPE} --batch 8 --precision O1,O2 --json") == 0
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert {row["precision"] for row in rows} == {"O1:fp16", "O2:fp16"}


def test_a_processors_speed_is_unknown_and_precision_not_given_up_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = "--layers 2 --hidden 64 --heads 4 --seq 32 --vocab 100 --batch 8"
    assert run(f"--card T4 --cpu {small} --json") == 0
    chosen = json.loads(capsys.readouterr().out)["recommended"]
    assert (chosen["precision"], chosen["labels"]["time_per_sample_s"]) == ("O0", "unknown")
    assert chosen["time_per_sample_s"] is None


def test_names_as_drivers_and_people_write_them() -> None:
    for text in ("Tesla T4", "NVIDIA GeForce RTX 3090", "a100 80gb", "NVIDIA A100-80GB", "h100"):
        assert find_card(text).capability is not None


def test_what_nothing_fits_into_is_the_smallest_of_all_plans(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = f"--card 8GB --params 1.3B {SHAPE} --batch 64 --family exact --json"
    assert run(options) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended"] is None
    smallest = min(row["needed_bytes"] for row in answer["plans"])
    assert f"it takes {smallest / 1e9:.1f} GB" in answer["reason"]
    assert run(f"--card T4 {SHAPE} --batch 4096 --max-accumulation 4 --json --family exact") == 1
    assert run("--card 4GB --layers 2 --hidden 512 --heads 8 --seq 512 --vocab 50304"
               " --batch 256 --max-accumulation 2") == 1  # fmt: skip
    assert "accumulate more (--max-accumulation)" in capsys.readouterr().out


def test_a_family_that_costs_much_time_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--layers 32 --hidden 4096 --heads 32 --seq 4096 --vocab 32000"
    assert run(f"--card H100 {shape} --batch 128") == 0
    printed = capsys.readouterr().out
    assert "times as long as O2:bf16 of family lora" in printed


def test_space_and_preset_are_in_the_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(f"--card T4 --params 1.3B {SHAPE} --batch 64 --json --space --preset simple-tree") == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert {"precision", "sharding", "accumulation", "peak_bytes", "fits"} <= set(
        answer["space"][0]
    )
    assert answer["preset"][-1].startswith("  honest estimate")


def test_a_closed_stdout_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(f"--card T4 --params 1.3B {SHAPE} --batch 64") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            [sys.executable, "-m", "mpwatch", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
    assert child.returncode == 2
    assert child.stderr == "mpwatch: cannot write the output: No space left on device\n"


def test_without_matplotlib_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'mpwatch\[plan\]'"):
        run(f"--card T4 {SHAPE} --batch 8 --picture a.png")


def test_without_numpy_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match=r"pip install 'mpwatch\[plan\]'"):
        run(f"--card T4 {SHAPE} --batch 8")
