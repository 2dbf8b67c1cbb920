"""Keeps the batch that overflowed, and runs a kept one through the model again.

Tensors as safetensors, everything else as JSON: nothing in a kept batch can run code. Asked for by
`--dump-bad-batch` and `--replay-batch`; without them nothing here is imported.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpwatch_agent.forward_trace import ForwardTrace
from mpwatch_agent.held_inputs import HeldInputs
from mpwatch_agent.rerun import RandomStates, autocast_like, undone

# Of one run, so many are kept.
KEPT_AT_MOST = 5
FORMAT = 1


class NotReplayable(Exception):
    """A kept batch that cannot be run here, and why."""


class Keeper:
    """Holds the inputs of an open window by reference and writes those that are asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held = HeldInputs()
        self._kept = 0

    def hold(self, micro: Any, scenes: list[Any]) -> None:
        """The forwards of a micro-batch, until its window ends."""
        self._held.hold(micro, scenes)

    def window_over(self) -> None:
        """Let go of everything."""
        self._held.window_over()

    def keep(self, micro: Any, step: int, micro_batch: int | None, scale: float | None) -> str:
        """Write the batch of `micro`; where to, relative to the run's directory, or why not."""
        scenes = self._held.of(micro)
        root = scenes[-1].root() if scenes else None
        if root is None:
            return "not kept: no forward of a root was seen, or the window holds more than 64 MB"
        if self._kept >= KEPT_AT_MOST:
            return f"not kept: there are {KEPT_AT_MOST} already"
        place = f"crash/step-{step}-micro-{'x' if micro_batch is None else micro_batch}"
        facts = {"step": step, "micro_batch": micro_batch, "scale": scale}
        try:
            _write(self._directory / place, scenes[-1], root, facts)
        except (ImportError, OSError, RuntimeError) as error:
            return f"not kept: {error}"
        self._kept += 1
        return place


def _write(target: Path, scene: Any, root: nn.Module, facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {"rng": scene.random}
    arguments = _described([list(scene.arguments), scene.named or {}], tensors)
    described = {
        "format": FORMAT,
        "root": type(root).__name__,
        "arguments": arguments,
        "autocast": scene.autocast and str(scene.autocast).removeprefix("torch."),
        **facts,
    }
    save_file(_plain(tensors), target / "batch.safetensors")
    save_file(_plain(root.state_dict()), target / "weights.safetensors")
    (target / "batch.json").write_text(json.dumps(described, indent=1) + "\n")


def replay(directory: Path, root: nn.Module) -> ForwardTrace:
    """Run a kept batch through `root`, with its weights and random numbers as they were.

    Raises:
        NotReplayable: nothing that fits this model is kept there.
    """
    from safetensors.torch import load_file

    try:
        described = json.loads((directory / "batch.json").read_text())
        tensors = load_file(directory / "batch.safetensors")
        weights = load_file(directory / "weights.safetensors")
        arguments, named = _built(described["arguments"], tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotReplayable(f"{directory} holds no kept batch: {error}") from None
    try:
        root.load_state_dict(weights)
    except RuntimeError as error:
        raise NotReplayable(f"the weights do not fit {type(root).__name__}: {error}") from None
    name = described.get("autocast")
    autocast = (True, getattr(torch, name)) if name else None
    trace = ForwardTrace(root)
    trace.look_at_inputs((arguments, named))
    with undone(root, RandomStates(tensors["rng"])), autocast_like(autocast, "cpu")():
        trace.run(lambda: root(*arguments, **named))
    return trace


def _described(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON, its tensors put into `tensors` by name."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[str(key), _described(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_described(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return {"unkept": type(value).__name__}


def _built(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    (kind, content), *_ = described.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_built(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "value":
        return content
    raise ValueError(f"the forward took a {content}, which is not kept")


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that share no memory, as the format wants them."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
