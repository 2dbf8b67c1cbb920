"""All loss scalers on the same fp16 training with heavy-tailed gradients: what each one wastes.

    python benchmarks/scalers.py [--steps N] [--seeds N]

Run by hand. Each scaler trains the same small net on the same batches in fp16 autocast, all from a
first scale of 2^16. Per-sample weights follow a Student
t distribution and features span many octaves, so that no scale fits everything. Columns: windows
lost to overflow, the share of weight gradients of applied windows that came out as zero (in exact
arithmetic none is), and where the scale went. Ends with exit code 1 if any preset is better than
`histogram` in both.
"""

import argparse
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpwatch_agent.gradient_scaling import gradients_of, largest, unscale
from mpwatch_agent.scaler_presets import PRESETS, policy_of
from mpwatch_agent.scaling import LossScaler

FEATURES = 48
BATCH = 16


class Result(NamedTuple):
    """One scaler's run. `underflow` is a share, `wasted` counts windows."""

    wasted: int
    underflow: float
    lowest: float
    highest: float
    last: float
    loss: float


def batches(seed: int, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The same for every scaler: inputs, targets, heavy-tailed weights."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.linspace(0, -24, FEATURES)
    tail = torch.distributions.StudentT(1.5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = tail.sample((steps, BATCH)).abs() * 8
    made = []
    for step in range(steps):
        x = torch.randn(BATCH, FEATURES, generator=generator) * 2**octaves
        y = torch.randn(BATCH, 1, generator=generator)
        made.append((x, y, weights[step].unsqueeze(1)))
    return made


def train(name: str, data: list[tuple[Tensor, Tensor, Tensor]], seed: int) -> Result:
    """Train with one scaler."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = LossScaler(policy_of(name, init_scale=2.0**16))
    wasted, zeros, values, loss_sum = 0, 0, 0, 0.0
    scales = []
    for x, y, weight in data:
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss = (weight * (output.float() - y) ** 2).mean()
        scales.append(scaler.scale)
        (loss * scaler.scale).backward()
        gradients = gradients_of([optimizer])
        with torch.no_grad():
            overflowed = unscale(gradients, scaler.scale)
            peak = largest(gradients) if scaler.guide is not None and not overflowed else None
        if overflowed:
            wasted += 1
        else:
            zeros += sum(int((gradient == 0).sum()) for gradient in gradients)
            values += sum(gradient.numel() for gradient in gradients)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.item()
        scaler.update(overflowed, peak=peak)
    share = zeros / values if values else 1.0
    return Result(wasted, share, min(scales), max(scales), scaler.scale, loss_sum / len(data))


def better_in_both(results: dict[str, Result]) -> list[str]:
    """Presets that waste fewer windows than `histogram` and lose a smaller share as well."""
    ours = results["histogram"]
    return [
        name
        for name, other in results.items()
        if other.wasted < ours.wasted and other.underflow < ours.underflow
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="all loss scalers on the same fp16 training")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    beaten = False
    for seed in range(arguments.seeds):
        data = batches(seed, arguments.steps)
        results = {name: train(name, data, seed) for name in PRESETS}
        print(f"seed {seed}, {arguments.steps} windows")
        print(f"{'scaler':10} {'wasted':>7} {'underflow':>10}  {'lowest':>8} {'highest':>8} last")
        for name, result in results.items():
            lowest, highest, last = (
                f"2^{torch.tensor(scale).log2().item():.0f}"
                for scale in (result.lowest, result.highest, result.last)
            )
            print(
                f"{name:10} {result.wasted:7} {result.underflow:10.2%}"
                f"  {lowest:>8} {highest:>8} {last}  loss {result.loss:.4f}"
            )
        better = better_in_both(results)
        beaten = beaten or bool(better)
        print(f"better than histogram in both: {', '.join(better) or 'none'}\n")
    return int(beaten)


if __name__ == "__main__":
    sys.exit(main())
