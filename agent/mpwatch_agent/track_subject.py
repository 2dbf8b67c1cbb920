"""The user's side of a tracked step: module, inputs, loss, and how a planner's words apply to it.

Loads the factory's file, wraps repeated blocks in checkpointing, changes dtypes inside a fake mode
and makes the optimizer. Used by `track_step`; never by a live run.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpwatch_agent.tracker import tensors_in

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossFunction = Callable[..., torch.Tensor]


class Configuration(Struct, frozen=True, kw_only=True):
    """One way to train the module."""

    precision: str = "O0"
    micro_batch: int = 1
    accumulation_steps: int = 1
    checkpointing: str = "none"
    optimizer: str = "adamw-loop"


class Subject(Struct, frozen=True, kw_only=True):
    """The user's side: how to make the module, its inputs and its loss."""

    factory: Callable[[], nn.Module]
    input_shapes: tuple[tuple[int, ...], ...]
    """without the batch"""
    input_dtypes: tuple[torch.dtype, ...]
    loss: LossFunction

    def inputs(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """A batch of zeros."""
        return tuple(
            torch.zeros((micro_batch, *shape), dtype=dtype)
            for shape, dtype in zip(self.input_shapes, self.input_dtypes, strict=True)
        )


def mean_loss(output: Any, *_: torch.Tensor) -> torch.Tensor:
    """A scalar output or `.loss` as it is, else the mean of the first floating tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            return tensor if tensor.dim() == 0 else tensor.float().mean()
    raise TypeError("the output holds no floating-point tensor to take a loss from")


def cross_entropy_loss(output: Any, *_: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the last dimension, targets being as many class indices."""
    logits = next(tensors_in(output))
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.view(-1))


LOSSES: dict[str, LossFunction] = {"mean": mean_loss, "cross_entropy": cross_entropy_loss}


def half_of(precision: str) -> torch.dtype:
    """The 16-bit dtype of `O1:bf16` and the like."""
    return HALVES[precision.partition(":")[2] or "bf16"]


def replace_parameters(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put changed copies in place of floating parameters and buffers, ties kept.

    `Module.to` cannot swap tensors in a fake mode.
    """
    done: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in done:
                    changed = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                    done[id(parameter)] = changed
                part._parameters[name] = done[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = done.setdefault(id(buffer), change(buffer))


@contextlib.contextmanager
def conversions_allowed() -> Iterator[None]:
    """Let a factory call `half()`, `to(dtype)` and the like in a fake mode, where torch cannot swap
    tensors: changed parameters take the places of the old ones."""
    original = nn.Module._apply

    def apply(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        done: dict[int, tuple[Any, Any]] = vars(change).setdefault("replaced", {})
        for child in module.children() if recurse else ():
            child._apply(change)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                changed = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                _, kept = done.setdefault(id(parameter), (parameter, changed))
                module._parameters[name] = kept
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Children of lists and sequences that hold at least two of one class, outermost first.

    These are what block checkpointing wraps: a transformer's layers, a ResNet's stages.
    """
    blocks: list[nn.Module] = []
    if isinstance(module, nn.ModuleList | nn.Sequential):
        kinds = [type(child) for child in module]
        blocks = [
            child
            for child in module
            if kinds.count(type(child)) > 1 and len(list(child.children())) > 0
        ]
    if blocks:
        return blocks
    return [block for child in module.children() for block in repeated_blocks(child)]


def apply_checkpointing(module: nn.Module) -> None:
    """Recompute each repeated block in backward.

    Raises:
        ValueError: there are no repeated blocks.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError("checkpointing is left out: the module has no repeated blocks")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of that planner name; 8-bit states have no CPU implementation."""
    kind, _, implementation = name.partition("-")
    if kind == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=1e-4,
            foreach=implementation == "foreach",
            fused=implementation == "fused",
        )
    if kind == "sgd":
        momentum = 0.9 if implementation == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=1e-4, momentum=momentum, foreach=True)
    raise ValueError(f"optimizer {name!r} cannot be tracked")


class SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that survives `copy.deepcopy` of the modules made in it.

    Modules that clone their layers (nn.Transformer) would copy the mode along with the tensors;
    tensors of two modes do not mix, and operators then take other paths than on real tensors.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: dict[int, object]) -> "SharedFakeMode":
        """The same mode."""
        return self


def fake_leftovers(module: nn.Module, mode: FakeTensorMode) -> None:
    """Tensors that the factory made outside torch (numpy, files) become fake as well."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
        replace_parameters(
            module, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t)
        )


def load_function(spec: str) -> Callable[..., Any]:
    """What `file.py:name` names. The file runs as an imported module, not as `__main__`.

    Raises:
        LookupError: no such file or no such callable in it.
    """
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text).resolve()
    if not (path_text and name and path.is_file()):
        raise LookupError(f"{spec!r} names no file and function: write file.py:factory")
    sys.path.insert(0, str(path.parent))
    own_name = f"planned_{path.stem}"  # never the name of a module that someone else imports
    module_spec = importlib.util.spec_from_file_location(own_name, path)
    if module_spec is None or module_spec.loader is None:
        raise LookupError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[own_name] = module
    module_spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise LookupError(f"{path.name} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def find_dtype(name: str) -> torch.dtype:
    """`int64`, `float32`, ... Raises LookupError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LookupError(f"unknown input dtype {name!r}: one of int64, float32, ...")
    return dtype


def find_loss(name: str) -> LossFunction:
    """A loss by name (`mean`, `cross_entropy`) or `file.py:function(output, *inputs)`."""
    if name not in LOSSES and ":" not in name:
        raise LookupError(f"unknown loss {name!r}: mean, cross_entropy or file.py:function")
    return LOSSES.get(name) or load_function(name)
