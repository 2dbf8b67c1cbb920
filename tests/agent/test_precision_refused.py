"""Where zero-code mixed precision does not apply it is refused by name, and nothing is harmed."""

import time
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
            end = time.monotonic() + 120
            while None in (watched.poll(), plain.poll()) and time.monotonic() < end:
                listener.drain(0.05)
            listener.drain(0.1)
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
