"""Loops that are run twice: with accumulation written by hand, and without it under mpwatch.

    python accumulated.py hand|plain K CASE...      prints one digest per case

In `hand` the loop itself divides by K and steps every K-th window; in `plain` it knows nothing of
K. What both print must be the same where `plain` is watched with `--accumulate K`.
"""

import itertools
import sys

import torch

from tests.support import accumulated_styles as styles
from tests.support.accumulated_scaled import KINDS, OPTIMIZERS, gan, matrix, rescaled

CASES = {
    f"{o}-{k}-{s}-{'clip' if c else 'free'}-{r}": (
        lambda o=o, k=k, s=s, c=c, r=r: matrix(o, k, s, c, r)
    )
    for o, k, s, c, r in itertools.product(
        OPTIMIZERS, KINDS, ("none", "scaled", "unscaled"), (False, True), ("none", "cosine")
    )
    if not (s == "scaled" and c)  # clipping scaled gradients is no recipe
}
CASES |= {
    f"overflow-{o}-{k}-{s}": (
        lambda o=o, k=k, s=s: matrix(o, k, s, s == "unscaled", "cosine", bad=(7, 9))
    )
    for o, k, s in itertools.product(("sgd", "adamw"), KINDS, ("scaled", "unscaled"))
}
CASES |= {
    f"zeroing-{how}": (lambda how=how: styles.zeroing(how))
    for how in ("model", "zeros", "none", "in_place", "optimizer")
}
CASES |= {
    f"discarded-{how}": (lambda how=how: styles.discarded(how))
    for how in ("clip", "read", "none", "in_place")
}
CASES |= {
    "sequential": lambda: matrix("sgd", "loop", "none", False, "sequential"),
    "bf16-loss": lambda: matrix("sgd", "loop", "scaled", False, "none", dtype=torch.bfloat16),
    "gan": gan,
    "rescaled": rescaled,
    "averaged": styles.averaged,
    "raised": styles.raised,
    "grown": styles.grown,
    "reentrant": lambda: styles.reentrant(True),
    "checkpoint": lambda: styles.reentrant(False),
    "given": lambda: styles.with_gradient(styles.given),
    "several": lambda: styles.with_gradient(styles.several),
    "taken": lambda: styles.with_gradient(styles.taken),
    "sparse": styles.sparse,
    "conditional": styles.conditional,
    "epochs": styles.epochs,
    "scheduler-first": styles.scheduler_first,
    "twice": styles.accumulate_twice,
}

if __name__ == "__main__":
    for name in sys.argv[3:] or CASES:
        print(name, CASES[name]())
