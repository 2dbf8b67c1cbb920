"""A small GPT whose memory is known to the byte: the model behind the measured cells.

By default 1024 words, width 256, 4 layers, 4 heads, 128 tokens: 3,716,608 parameters, head untied
and without bias. The loss is the mean cross-entropy in fp32, computed inside forward.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Pre-norm attention and a GELU MLP of four times the width."""

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm_in = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over (batch, length, width), heads side by side."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if self.attention == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.transpose(-2, -1)) / math.sqrt(width // self.heads)
            mixed = functional.softmax(scores, dim=-1) @ value
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual block."""
        x = x + self.attend(self.norm_in(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm_mlp(x))))


class ToyGPT(nn.Module):
    """forward(ids, targets), both int64 (batch, length), returns the mean loss."""

    def __init__(
        self,
        vocabulary: int = 1024,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        length: int = 128,
        attention: str = "math",
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def build() -> ToyGPT:
    """The default model."""
    return ToyGPT()


def build_sdpa() -> ToyGPT:
    """The default model with fused attention."""
    return ToyGPT(attention="sdpa")


def build_large() -> ToyGPT:
    """1.419e9 parameters: width 2048, 24 layers, 16 heads, 2048 tokens, 50304 words."""
    return ToyGPT(50304, 2048, 24, 16, 2048, attention="sdpa")
