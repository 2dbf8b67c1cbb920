"""Trains a module for real and reads the peak from PyTorch's own profiler.

A plain training loop, written without the planner or the tracker, so that it can judge both.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

Loss = Callable[..., torch.Tensor]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cross_entropy(output: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of (..., classes) against class 0."""
    targets = torch.zeros(output.shape[:-1], dtype=torch.int64)
    return nn.functional.cross_entropy(
        output.reshape(-1, output.shape[-1]).float(), targets.view(-1)
    )


def mean(output: torch.Tensor) -> torch.Tensor:
    """The mean in fp32, or the scalar itself."""
    return output if output.dim() == 0 else output.float().mean()


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    """(time, bytes; negative when freed) of every CPU allocation in the event tree."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size


def profiled_peak(work: Callable[[], None]) -> int:
    """Largest running sum of the profiler's memory events while `work` runs, in bytes."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    live = peak = 0
    for _, nbytes in sorted(_allocations(tree), key=lambda item: item[0]):
        live += nbytes
        peak = max(peak, live)
    return peak


def _checkpointed(blocks: list[nn.Module]) -> None:
    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = wrapped(block.forward)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the toy modules, by name."""
    transformer = getattr(module, "transformer", None)
    if transformer is not None:
        return [*transformer.encoder.layers, *transformer.decoder.layers]
    return list(getattr(module, "blocks", None) or module.layers)


def train(
    build: Callable[[], nn.Module],
    make_batch: Callable[[int], tuple[torch.Tensor, ...]],
    loss_of: Loss,
    *,
    precision: str,
    micro_batch: int,
    accumulation_steps: int,
    checkpointing: str,
    optimizer: str,
    windows: int = 2,
) -> None:
    """A few windows as people write them, on real tensors."""
    level, _, half = precision.partition(":")
    module = build()
    if level in ("O2", "O3"):
        module.to(HALF[half])
    if checkpointing == "full":
        _checkpointed(blocks_of(module))
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in trained] if level == "O2" else []
    updated = _optimizer(optimizer, masters or trained)
    for _ in range(windows):
        for _ in range(accumulation_steps):
            batch = make_batch(micro_batch)
            with _autocast(level, half):
                output = module(*(_fed(tensor, level, half) for tensor in batch))
                loss = loss_of(output)
            (loss / accumulation_steps if accumulation_steps > 1 else loss).backward()
        for master, parameter in zip(masters, trained, strict=bool(masters)):
            master.grad = parameter.grad.float()
        updated.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=bool(masters)):
                parameter.copy_(master)
        updated.zero_grad(set_to_none=True)
        module.zero_grad(set_to_none=True)


def _fed(tensor: torch.Tensor, level: str, half: str) -> torch.Tensor:
    """Floats are fed to 16-bit modules in 16 bits."""
    cast = level in ("O2", "O3") and tensor.is_floating_point()
    return tensor.to(HALF[half]) if cast else tensor


def _autocast(level: str, half: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", HALF[half]) if level == "O1" else contextlib.nullcontext()


def _optimizer(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return {
        "adamw-loop": lambda: torch.optim.AdamW(parameters, foreach=False),
        "adamw-foreach": lambda: torch.optim.AdamW(parameters, foreach=True),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, fused=True),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01, foreach=True),
    }[name]()
