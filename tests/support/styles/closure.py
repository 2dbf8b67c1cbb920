"""optimizer.step(closure): forward and backward happen inside the step.

python closure.py lbfgs|sgd
"""

import sys

import torch
from truth import Truth

torch.manual_seed(0)
x = torch.randn(16, 4)
y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
model = torch.nn.Linear(4, 1)
if sys.argv[1] == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    return loss


for _ in range(4):
    returned = optimizer.step(closure)
    truth.step()
    print("returned", returned.item().hex())
truth.finish(model.parameters())
