"""A loop with a GradScaler of its own and overflows at random: `STYLE WINDOWS`.

STYLE: "one" (SGD), "fused" (AdamW, with and without `unscale_`), "several" (three optimizers).
Prints JSON: the scale after each window, which optimizers changed their weights in it, the weights'
hash, and the state of the scaler. "reload" saves and loads the scaler's state half way.
"""

import hashlib
import json
import random
import sys

import torch

style, windows = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
numbers = random.Random(7)
weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(3 if style == "several" else 1)]
if style == "fused":
    optimizers = [torch.optim.AdamW(weights, lr=0.01, fused=True)]
else:
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in weights]
if style == "several":
    optimizers[1] = torch.optim.AdamW([weights[1]], lr=0.01, fused=True)
    optimizers[2] = torch.optim.Adam([weights[2]], lr=0.01, foreach=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)

scales, changed, streak = [], [], 0
for index in range(windows):
    if not streak and numbers.random() < 0.1:
        streak = numbers.choice([1, 1, 2, 4])
    loss = torch.zeros(())
    for position, weight in enumerate(weights):
        term = (weight**2).sum()
        # With several optimizers only some of them overflow.
        bad = streak and (len(weights) == 1 or (index + position) % 3)
        loss = loss + (term * float("inf") if bad else term)
    streak = max(0, streak - 1)
    before = [weight.detach().clone() for weight in weights]
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        if index % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    changed.append([int(not torch.equal(a, b)) for a, b in zip(before, weights, strict=True)])
    scales.append(scaler.get_scale())
    if "reload" in sys.argv and index == windows // 2:
        state = scaler.state_dict()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.load_state_dict(state)

digest = hashlib.sha256()
for weight in weights:
    digest.update(weight.detach().numpy().tobytes())
print(
    json.dumps(
        {
            "scales": scales,
            "changed": changed,
            "weights": digest.hexdigest(),
            "state": scaler.state_dict(),
        }
    )
)
