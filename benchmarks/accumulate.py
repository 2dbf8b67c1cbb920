"""What a swallowed script window costs the training thread: `python benchmarks/accumulate.py`.

In place, with 10 ms of real work per window, K switched between 1 and 8 in random blocks. Printed:
the agent's own time per swallowed window, the part of it that is the stash's pass over the
gradients, what observing an update of the same loop takes (K is 1), and the rest, against its
budget of 20 us; a whole update against one that is written by hand; and the unit of all of it, a
bare call of Python right after a window's work.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpwatch_agent import agent as agents
from mpwatch_agent import shield
from mpwatch_agent.drafts import StepDraft
from mpwatch_agent.stash import Stash

BUDGET_S, K, WINDOWS = 20e-6, 8, 8


class Bench:
    """A loop with scaler and clip; one micro-batch per window of the script."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self._model = nn.Sequential(*blocks)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self._data = torch.randn(32, width)

    def window(self) -> None:
        loss = self._model(self._data).pow(2).mean()
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def by_hand(self, k: int) -> None:
        """The same update as `k` windows make of it, written in the script."""
        for _ in range(k):
            loss = self._model(self._data).pow(2).mean() / k
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


def timed_stash(spent: list[float], clock: Callable[[], float]) -> None:
    """Let the stash's passes add their seconds to `spent`."""
    add = Stash.add

    def timed(self: Stash, *args: Any, **kwargs: Any) -> None:
        start = clock()
        add(self, *args, **kwargs)
        spent[0] += clock() - start

    Stash.add = timed  # type: ignore[method-assign]


def compared(agent: agents.Agent, bench: Bench, blocks: int) -> list[float]:
    """Ratios of an update of K windows to one that is written by hand and unwatched."""
    ratios = []
    for _ in range(blocks):
        agent.gate.open = True
        start = time.perf_counter()
        for _ in range(K):
            bench.window()
        ours = time.perf_counter() - start
        agent.gate.open = False
        start = time.perf_counter()
        bench.by_hand(K)
        ratios.append(ours / (time.perf_counter() - start))
    agent.gate.open = True
    return ratios


def nothing() -> None:
    """What a hook costs at least."""


def told_by(agent: agents.Agent) -> list[float]:
    """The agent's own seconds of each step that will end from now on."""
    told: list[float] = []
    over = agent.sampling.step_over

    def telling(loop: Any, draft: StepDraft) -> None:
        over(loop, draft)
        told.append(draft.agent_s - draft.sampled_s)

    agent.sampling.step_over = telling  # type: ignore[method-assign]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--cpu", action="store_true", help="CPU time, where others use the cores")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spent = [0.0]
    clock = time.thread_time if args.cpu else time.perf_counter
    shield._clock = clock
    timed_stash(spent, clock)
    agent = agents.install_here(None)
    # The location of overflows has a budget of its own.
    agent.observing.locator.flags.mode = "off"
    bench = Bench(args.layers, args.width)
    part = agent.accumulating.begin(1)
    for _ in range(2 * WINDOWS):
        bench.window()
    observing = told_by(agent)
    swallowed: list[float] = []
    stash: list[float] = []
    bare: list[float] = []
    dice = random.Random(0)
    for _ in range(args.blocks):
        part.k = dice.choice((1, K))
        agent.gate.own_s = spent[0] = 0.0
        told = len(observing)
        # The last window of a real one is no swallowed one: it is left out.
        for _ in range(WINDOWS if part.k == 1 else K - 1):
            bench.window()
        if part.k > 1:
            swallowed.append(agent.gate.own_s / (K - 1))
            stash.append(spent[0] / (K - 1))
            bench.window()
            del observing[told:]
        start = clock()
        nothing()
        bare.append(clock() - start)
    passes, seen = statistics.median(stash), statistics.median(observing)
    whole = statistics.median(swallowed)
    rest = whole - passes
    print(f"a bare call        {statistics.median(bare) * 1e6:7.1f} us")
    print(f"observing an update{seen * 1e6:7.1f} us")
    print(f"swallowed window   {whole * 1e6:7.1f} us")
    print(f"  the stash's pass {passes * 1e6:7.1f} us")
    verdict = "within" if rest <= BUDGET_S else "OVER"
    part.k = K
    ratio = statistics.median(compared(agent, bench, args.blocks))
    print(f"  the rest         {rest * 1e6:7.1f} us; budget {BUDGET_S * 1e6:.0f} us: {verdict}")
    print(f"an update of {K} windows takes {ratio:.3f} x one that is written by hand, unwatched")


if __name__ == "__main__":
    main()
