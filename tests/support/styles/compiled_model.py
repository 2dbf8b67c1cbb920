"""torch.compile(model), or the module compiled in place by model.compile().

python compiled_model.py wrapped|in_place
"""

import sys

import counting
import torch
from truth import Truth


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.hidden(x).relu())


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if sys.argv[1] == "wrapped":
    model = torch.compile(model, backend=counting.backend)
else:
    model.compile(backend=counting.backend)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    truth.step()
counting.report()
truth.finish(model.parameters())
