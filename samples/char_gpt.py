"""Train a small byte-level GPT on the English text that every Python carries in pydoc.

    python samples/char_gpt.py [--dtype bf16|fp16|fp32] [--device cpu|cuda] [--steps N]

Mixed precision with a gradient scaler, four micro-batches per update, clipping, warm-up and
cosine decay. The default run takes about three minutes on two cores.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

CONTEXT = 128
VOCABULARY = 128  # ASCII; the few other characters of the text become "?"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(b, s, c))
        return x + self.feed_forward(self.norm2(x))


class CharGPT(nn.Module):
    """Maps byte ids (b, s) to logits (b, s, vocabulary); s is at most CONTEXT."""

    def __init__(self, width: int = 64, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    """The model of this script, untrained: int64 ids (b, s <= 128) to logits (b, s, 128)."""
    return CharGPT()


class Windows(Dataset):
    """Every window of CONTEXT + 1 bytes of the text, as inputs and next-byte targets."""

    def __init__(self, text: bytes) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.ids) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.ids[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


def learning_rate_factor(step: int, warmup: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parse_args() -> argparse.Namespace:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="train a byte-level GPT on pydoc's topics")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--steps", type=int, default=400, help="number of updates")
    parser.add_argument("--batch-size", type=int, default=4, help="windows per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="per update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    dtype = DTYPES[args.dtype]

    windows = Windows("\n".join(topics.values()).encode("ascii", "replace"))
    samples = args.steps * args.micro_batches * args.batch_size
    sampler = RandomSampler(windows, replacement=True, num_samples=samples)
    loader = iter(DataLoader(windows, batch_size=args.batch_size, sampler=sampler))

    model = build_model().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = min(20, args.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warmup, args.steps)
    )
    scaler = torch.amp.GradScaler(args.device, enabled=dtype != torch.float32)

    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(windows):,} windows, {args.dtype} on {args.device}")
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        total = torch.zeros((), device=args.device)
        for _ in range(args.micro_batches):
            ids, targets = (t.to(args.device, non_blocking=True) for t in next(loader))
            with torch.autocast(args.device, dtype=dtype, enabled=dtype != torch.float32):
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            scaler.scale(loss / args.micro_batches).backward()
            total += loss.detach() / args.micro_batches

        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

        if step == 1 or step % args.log_every == 0 or step == args.steps:
            seconds = time.perf_counter() - started
            print(
                f"step {step:4d}  loss {total.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}  "
                f"{seconds:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
