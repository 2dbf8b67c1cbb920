"""Small modules of other kinds for the tracker, and factories that misbehave.

Each `build_*` takes nothing and returns a Module; the misbehaving ones are named for what they do.
"""

import subprocess
import time

import numpy as np
import torch
from torch import nn

from tests.support.toy_gpt import Layer


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape out as in."""
        return nn.functional.relu(x + self.body(x))


class Perceptron(nn.Module):
    """An MLP of repeated blocks: (batch, 256) to (batch, 10)."""

    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(256, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.last(self.blocks(self.first(x)))


class ConvNet(nn.Module):
    """A residual net: (batch, 3, 32, 32) to (batch, 10)."""

    def __init__(self, channels: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Language(nn.Module):
    """A GPT that returns scores: int64 (batch, length) to (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 4, "sdpa") for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Translator(nn.Module):
    """An encoder-decoder on nn.Transformer: two int64 (batch, length) to scores."""

    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            width, 4, layers, layers, 4 * width, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores of the next target token."""
        return self.head(self.transformer(self.tokens(source), self.tokens(target)))


class Branching(nn.Module):
    """Reads a value to decide what to do: no fake tensor has one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One or two passes."""
        x = self.body(x)
        if x.sum() > 0:
            x = self.body(x)
        return x


def build_perceptron() -> nn.Module:
    """MLP."""
    return Perceptron()


def build_conv() -> nn.Module:
    """Convolutions and batch norm."""
    return ConvNet()


def build_language() -> nn.Module:
    """GPT."""
    return Language()


def build_translator() -> nn.Module:
    """Encoder-decoder."""
    return Translator()


def build_branching() -> nn.Module:
    """Data-dependent control flow."""
    return Branching()


def build_from_numpy() -> nn.Module:
    """Weights that never were made by torch."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((4, 4), dtype=np.float32)))
    return model


def build_terabyte() -> nn.Module:
    """A parameter of 10^12 bytes: harmless on fake tensors, too large for any card."""
    return nn.Linear(500_000, 500_000, bias=False)


class Recurrent(nn.Module):
    """An LSTM over one step: (batch, 16) to (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        return self.body(x[:, None])[0]


def build_double() -> nn.Module:
    """Converted by the factory."""
    return nn.Linear(16, 16).double()


def build_half_recurrent() -> nn.Module:
    """Converted, with flat weights that must follow."""
    return Recurrent().to(torch.bfloat16)


def build_tied_half() -> nn.Module:
    """Converted with a tie, which must hold."""
    layers = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    layers[1].weight = layers[0].weight
    return layers.half()


def build_normed() -> nn.Module:
    """Batch norm, which cannot train on one sample."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def train_nothing() -> nn.Module:
    """Everything frozen."""
    return nn.Linear(16, 16).requires_grad_(False)


def leave_a_process_behind() -> nn.Module:
    """A child that keeps the standard streams open."""
    subprocess.Popen(["sleep", "60"])
    return nn.Linear(16, 16)


def raise_an_error() -> nn.Module:
    """A factory with a bug."""
    raise RuntimeError("weights file not found\nsecond line")


def allocate_a_terabyte() -> nn.Module:
    """Really asks the machine for 10^12 bytes."""
    block = np.ones(10**12, dtype=np.uint8)
    return nn.Linear(int(block[0]), 1)


def never_return() -> nn.Module:
    """Hangs."""
    time.sleep(3600)
    return nn.Linear(1, 1)


def return_a_string() -> str:
    """Not a module."""
    return "model"


def end_the_process() -> nn.Module:
    """Calls exit."""
    raise SystemExit(0)
