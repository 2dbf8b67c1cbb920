"""Where zero-code mixed precision does not apply it is refused by name, and nothing is harmed."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from mpwatch.events import HookDisabled, PrecisionApplied, PrecisionRefused
from tests.support.agent_runs import listening, specification
from tests.support.forge import Forge

LOOP = Path(__file__).resolve().parents[1] / "support" / "refusing_loop.py"

# What is asked, and words of the reason (None: it applies). "same": not one weight differs.
CASES = {
    "own_scaler": ("O1:fp16", "GradScaler of its own", "same"),
    "autocast_around": ("O1:fp16", "autocast of its own", "same"),
    "half_weights": ("O1:fp16", "bfloat16 already", "same"),
    "compiled_in_place": ("O1:bf16", "model.compile()", "same"),
    "compiled_function": ("O2:bf16", "compile", "same"),
    # Its layers are called from outside then: each is a root of its own.
    "forward_called": ("O1:bf16", None, "close"),
    "manual": ("O1:bf16", "no optimizer", "same"),
    "autocast_inside": ("O1:fp16", "inside the model's forward", "close"),
    "closure": ("O1:fp16", "closure", "same"),
    "in_backward": ("O1:fp16", "inside the backward", "close"),
    "autograd_grad": ("O1:fp16", "autograd.grad", "close"),
    "edited": ("O1:fp16", "changes gradients between", "close"),
    "closure ": ("O1:bf16", None, "close"),
    "in_backward ": ("O1:bf16", None, "close"),
    "autograd_grad ": ("O1:bf16", None, "close"),
}


def test_refusals_have_a_name_and_do_no_harm(forge: Forge, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs, plains = {}, {}
        for index, (name, (asked, _, _)) in enumerate(CASES.items()):
            directories = [tmp_path / f"{index}", tmp_path / f"{index}p"]
            for directory in directories:
                directory.mkdir()
            listener = stack.enter_context(listening(directories[0]))
            settings: dict[str, str | float] = {"precision": asked}
            if name in ("in_backward", "edited"):
                # Low enough for these losses: what is asked here is not how overflows are met.
                settings |= {"scaler": "torch", "init_scale": 256.0}
            given = specification(directories[0], **settings)
            kind = name.strip()
            watched = forge.run(LOOP, directories[0], kind, specification=given)
            if kind not in plains:
                plains[kind] = forge.run(LOOP, directories[1], kind, specification=None)
            plain = plains[kind]
            listener.follow(watched, plain)
            runs[name] = (listener, watched, plain)
    for name, (asked, words, likeness) in CASES.items():
        listener, watched, plain = runs[name]
        stdout, stderr = (text.decode() for text in watched.communicate())
        assert (watched.returncode, plain.returncode) == (0, 0), stderr
        assert listener.of(HookDisabled) == [], name
        refused = listener.of(PrecisionRefused)
        if words is None:
            assert refused == [], name
            assert len(listener.of(PrecisionApplied)) == 1, name
        else:
            assert len(refused) == 1, (name, refused)
            assert words in refused[0].reason, (name, refused)
            assert refused[0].mode == asked[:2]
            assert f"{refused[0].reason}\n" in stderr, name
        expected = plain.communicate()[0].decode()
        if likeness == "same":
            assert stdout == expected, name
            assert refused[0].after_step == 0, name
        else:
            mine, theirs = (
                [float(word) for word in text.splitlines()[1].split()]
                for text in (stdout, expected)
            )
            # A step on scaled gradients would be hundreds of times too large; one may be missing.
            # (LBFGS makes much of every rounding.)
            apart = {"edited": 0.15, "closure ": 1.0}.get(name, 0.01)
            assert mine == pytest.approx(theirs, abs=apart), name
            # Where it applies it does something.
            assert words is not None or stdout != expected, name


TWO = """
import torch
torch.manual_seed(0)
models = [torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for x in torch.randn(12, 8, 4):
    models[1](models[0](x)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(*(value.item() for model in models for p in model.parameters() for value in p.flatten()))
"""


def test_windows_of_two_optimizers_are_accumulated_without_it(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    ends = []
    for name, settings in (("alone", {}), ("both", {"precision": "O1:fp16", "scaler": "torch"})):
        directory = tmp_path / name
        directory.mkdir()
        spec = specification(directory, accumulate=3, **settings)
        with listening(directory) as listener:
            run = forge.run(tmp_path / "two.py", directory, specification=spec)
            listener.follow(run)
        assert run.returncode == 0, run.communicate()
        assert [step.micro_batches for step in listener.steps()] == [3] * 4
        ends.append(run.communicate()[0])
    (refused,) = listener.of(PrecisionRefused)
    assert "windows of several optimizers are accumulated" in refused.reason
    # The casts are the only thing that was done when it was found out.
    found = [[float(word) for word in end.split()] for end in ends]
    assert found[1] == pytest.approx(found[0], abs=0.01)
