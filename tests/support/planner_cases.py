"""Configurations on which predicted and measured peaks are compared: benchmark and suite alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support import measured_step, toy_modules

MODULES = Path(__file__).with_name("toy_modules.py")


class Architecture(NamedTuple):
    """A module with its inputs and loss, in the words of the plan verb and in Python."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    loss: str
    loss_of: Callable[[torch.Tensor], torch.Tensor]

    @property
    def model(self) -> str:
        """file.py:factory"""
        return f"{MODULES}:{self.build.__name__}"

    def batch(self, size: int) -> tuple[torch.Tensor, ...]:
        """A real batch of zeros."""
        dtype = getattr(torch, self.dtype)
        return tuple(torch.zeros((size, *shape), dtype=dtype) for shape in self.shapes)


ARCHITECTURES = {
    "mlp": Architecture(
        toy_modules.build_perceptron, ((256,),), "float32", "mean", measured_step.mean
    ),
    "conv": Architecture(
        toy_modules.build_conv, ((3, 32, 32),), "float32", "mean", measured_step.mean
    ),
    "gpt": Architecture(
        toy_modules.build_language, ((64,),), "int64", "cross_entropy", measured_step.cross_entropy
    ),
    "encoder-decoder": Architecture(
        toy_modules.build_translator,
        ((32,), (32,)),
        "int64",
        "cross_entropy",
        measured_step.cross_entropy,
    ),
}

# precision, micro-batch, N, checkpointing, optimizer
Case = tuple[str, int, int, str, str]

CONFIGURATIONS: tuple[Case, ...] = (
    ("O0", 16, 1, "none", "adamw-loop"),
    ("O0", 4, 4, "none", "adamw-foreach"),
    ("O0", 16, 1, "full", "sgd-momentum"),
    ("O1:bf16", 16, 1, "none", "adamw-fused"),
    ("O1:bf16", 4, 4, "none", "adamw-loop"),
    ("O1:bf16", 8, 2, "full", "adamw-loop"),
    ("O2:bf16", 16, 1, "none", "adamw-fused"),
    ("O2:bf16", 4, 4, "full", "adamw-loop"),
    ("O3:bf16", 8, 2, "none", "sgd"),
)
"""A batch of 16 in all of them."""

QUICK: tuple[tuple[str, Case], ...] = (
    ("mlp", ("O0", 16, 4, "none", "adamw-foreach")),
    ("mlp", ("O3:bf16", 8, 2, "none", "sgd")),
    ("conv", ("O0", 8, 2, "full", "sgd-momentum")),
    ("gpt", ("O1:bf16", 2, 2, "none", "adamw-loop")),
    ("gpt", ("O2:bf16", 2, 2, "full", "adamw-loop")),
    ("encoder-decoder", ("O1:bf16", 2, 1, "full", "adamw-fused")),
)
"""Six that the suite runs; 16-bit arithmetic is slow on processors without instructions for it."""


def fields(configuration: Case) -> dict[str, Any]:
    """The configuration by field name."""
    names = ("precision", "micro_batch", "accumulation_steps", "checkpointing", "optimizer")
    return dict(zip(names, configuration, strict=True))


def measured(architecture: str, configuration: Case) -> int:
    """Peak bytes of a real run, by PyTorch's profiler."""
    case = ARCHITECTURES[architecture]
    return measured_step.profiled_peak(
        lambda: measured_step.train(case.build, case.batch, case.loss_of, **fields(configuration))
    )
