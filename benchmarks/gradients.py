"""What looking at gradients costs: run by hand, prints each figure beside its budget.

    python benchmarks/gradients.py [--elements N] [--rounds R]

The exact histogram against a plain bincount of exponents and one sum; a sample; the flags after
each micro-batch against a micro-batch and against one `torch._foreach_norm`. All in place and
interleaved, medians over the rounds, CPU time of one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "agent"), str(ROOT / "samples")]

from mpwatch_agent import exponents, finiteness  # noqa: E402


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of this thread: other load on the machine counts little."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def compared(
    rounds: int, before: Callable[[], object] = int, **functions: Callable[[], object]
) -> dict[str, float]:
    """The median seconds of each function, run in turn, `before` run before each."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            before()
            took = seconds(function)
            if turn:
                times[name].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def said(what: str, value: float, budget: float, unit: str) -> None:
    verdict = "within" if value <= budget else "OVER"
    print(f"  {what:58} {value:9.3f} {unit}  budget {budget:g}: {verdict}")


def histogram(elements: int, rounds: int) -> None:
    values = torch.randn(elements) * 1e-3
    generator = torch.Generator().manual_seed(0)
    found = compared(
        rounds,
        sum=lambda: torch.sum(values),
        bincount=lambda: torch.bincount((values.view(torch.int32) >> 23) & 255, minlength=256),
        exact=lambda: exponents.exact([values]),
        sampled=lambda: exponents.sampled([values], [4096], generator),
    )
    print(f"one tensor of {elements:,} gradients")
    for name, took in found.items():
        print(f"  {name:58} {took * 1e3:9.3f} ms")
    said("exact / plain bincount", found["exact"] / found["bincount"], 2.0, "x")
    said("exact / one torch.sum (10 is the goal)", found["exact"] / found["sum"], 52.0, "x")


def flags(rounds: int, batch: int, width: int, layers: int) -> None:
    import char_gpt
    import torch.nn.functional as F

    model = char_gpt.CharGPT(width, 4, layers)
    ids = torch.randint(0, 128, (batch, 128))

    def micro_batch() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    optimizer = torch.optim.SGD(model.parameters())
    micro_batch()
    watched = finiteness.Watched(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = compared(
        rounds,
        micro_batch,
        micro_batch=micro_batch,
        default=lambda: watched.look(optimizer),
        full=lambda: watched.look_at_all(optimizer),
        foreach_norm=lambda: torch._foreach_norm(gradients),
    )
    elements = sum(gradient.numel() for gradient in gradients)
    print(f"char_gpt {width} wide: {len(gradients)} gradients, {elements:,} values, batch {batch}")
    for name, took in found.items():
        print(f"  {name:58} {took * 1e6:9.1f} us")
    said("default / micro-batch", found["default"] / found["micro_batch"] * 100, 1.0, "%")
    said("full / one foreach_norm", found["full"] / found["foreach_norm"], 1.3, "x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    histogram(arguments.elements, arguments.rounds)
    flags(arguments.rounds * 3, batch=4, width=64, layers=2)
    flags(arguments.rounds, batch=4, width=256, layers=4)


if __name__ == "__main__":
    main()
