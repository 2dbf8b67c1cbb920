"""The samples do what their first lines say; nothing here knows of mpwatch."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.forge import Forge

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def run_sample(forge: Forge, tmp_path: Path) -> Callable[..., str]:
    """Standard output of `python samples/NAME ARGS`, which must end well and say nothing else."""

    def run(name: str, *args: str) -> str:
        done = forge.run(SAMPLES / name, tmp_path, *args, specification=None)
        code = done.wait()
        stdout, stderr = done.communicate()
        assert (code, stderr) == (0, b"")
        return stdout.decode()

    return run


def load_sample(name: str) -> ModuleType:
    """The sample imported under a name of its own, so that its main guard holds."""
    spec = importlib.util.spec_from_file_location(f"sample_{name}", SAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


def weights(output: str) -> str:
    return output.splitlines()[-1]


@pytest.fixture(scope="module")
def char_gpt() -> ModuleType:
    return load_sample("char_gpt")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load_sample("digits")


@pytest.fixture
def run_digits(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the sample in this process, where torch and the images are there already."""

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["digits.py", *args])
        capsys.readouterr()
        digits.main()
        return capsys.readouterr().out

    return run


def test_char_gpt_learns_within_a_few_updates(run_sample: Callable[..., str]) -> None:
    args = ("--device", "cpu", "--steps", "12", "--batch-size", "1", "--log-every", "1")
    seen = losses(run_sample("char_gpt.py", *args))
    assert len(seen) == 12
    assert seen[0] == pytest.approx(4.85, abs=0.1)  # ln 128: an untrained model knows nothing
    assert seen[-1] < seen[0] - 0.8


def test_char_gpt_runs_in_fp16_on_the_cpu(
    char_gpt: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--dtype", "fp16", "--device", "cpu", "--steps", "2", "--batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["char_gpt.py", *args])
    char_gpt.main()
    assert len(losses(capsys.readouterr().out)) == 2


@pytest.mark.parametrize("length", [1, 128])
def test_char_gpt_build_model(char_gpt: ModuleType, length: int) -> None:
    ids = torch.randint(0, 128, (2, length))
    assert char_gpt.build_model()(ids).shape == (2, length, 128)


def test_char_gpt_looks_at_the_past_only(char_gpt: ModuleType) -> None:
    model = char_gpt.build_model().eval()
    ids = torch.randint(0, 128, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 128
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-6)


def test_digits_gives_the_same_weights_twice(run_sample: Callable[..., str]) -> None:
    """Written out, `--accumulate 1` is the default: the same run in every digit."""
    output = run_sample("digits.py", "--epochs", "2")
    assert re.search(r"^weights [0-9a-f]{64}$", output, re.MULTILINE)
    accuracy = re.search(r"test accuracy (\d\.\d+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.6
    assert run_sample("digits.py", "--epochs", "2", "--accumulate", "1") == output


def test_digits_accumulates_by_hand(run_digits: Callable[..., str]) -> None:
    """Two batches of 16 are one of 32 but for the order of summation, so not the same bits."""
    once = run_digits("--epochs", "1")
    twice = run_digits("--epochs", "1", "--accumulate", "2", "--batch-size", "16")
    assert twice != once
    assert losses(twice)[0] == pytest.approx(losses(once)[0], abs=0.05)


def test_digits_drops_the_window_left_over_at_the_end(
    digits: ModuleType, run_digits: Callable[..., str]
) -> None:
    """45 batches in an epoch and windows of 40: one update; five batches change nothing."""
    output = run_digits("--epochs", "1", "--accumulate", "40")
    torch.manual_seed(0)
    train, _ = digits.load_images()
    loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)
    model = digits.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in list(loader)[:40]:
        (torch.nn.functional.cross_entropy(model(images), labels) / 40).backward()
    optimizer.step()
    assert f"weights {digits.hash_weights(model)}" in output


def test_digits_counts_windows_across_epochs(run_digits: Callable[..., str]) -> None:
    """90 batches make two windows of 45 but also one of 90: the second epoch goes on counting."""
    untrained = run_digits("--epochs", "0")
    assert weights(run_digits("--epochs", "1", "--accumulate", "90")) == weights(untrained)
    assert weights(run_digits("--epochs", "2", "--accumulate", "90")) != weights(untrained)
