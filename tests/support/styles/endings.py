"""A loop that does not end well.

python endings.py exception|forward|exit|excepthook
"""

import sys

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()


def report(kind, error, traceback):
    print("the script's own hook:", kind.__name__, error)


def give_up(step):
    try:
        {}[step]
    except KeyError as error:
        raise RuntimeError(f"no batch {step}") from error


if sys.argv[1] == "excepthook":
    sys.excepthook = report
for step, x in enumerate(torch.randn(5, 8, 4)):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    if step == 3:
        truth.finish(model.parameters())
        if sys.argv[1] == "exit":
            sys.exit(3)
        if sys.argv[1] == "forward":
            model(x[:, :3])  # the shapes do not match: an error from deep inside torch
        give_up(step)
    optimizer.step()
    truth.step()
