"""One forward, two losses: two backwards with retain_graph, or one backward over a list.

python several_losses.py retain|list
"""

import sys

import torch
from torch import nn
from truth import Truth

torch.manual_seed(0)
trunk, heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 3)])
model = nn.ModuleList([trunk, heads])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
truth = Truth()
for x in torch.randn(5, 8, 4):
    hidden = trunk(x).relu()
    regression = (heads[0](hidden) - x[:, :1]).pow(2).mean()
    classification = nn.functional.cross_entropy(heads[1](hidden), x[:, :3].argmax(dim=1))
    optimizer.zero_grad()
    truth.micro_batch(regression, classification)
    if sys.argv[1] == "retain":
        regression.backward(retain_graph=True)
        classification.backward()
    else:
        torch.autograd.backward([regression, classification])
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
