"""while True with get_batch(), the learning rate written by hand, evaluation in between."""

import math

import torch
from truth import Truth

torch.manual_seed(0)
corpus = torch.randint(0, 16, (200,))
model = torch.nn.Sequential(
    torch.nn.Embedding(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 16)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def get_batch():
    starts = torch.randint(0, len(corpus) - 9, (4,))
    block = torch.stack([corpus[s : s + 9] for s in starts])
    return block[:, :-1], block[:, 1:]


def loss_of(x, y):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    mean = sum(loss_of(*get_batch()).item() for _ in range(3)) / 3
    model.train()
    return mean


truth = Truth()
iteration = 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * iteration / 6))
    if iteration % 2 == 0:
        print("evaluation", estimate_loss().hex())
    for _ in range(2):
        loss = loss_of(*get_batch()) / 2
        truth.micro_batch(loss)
        loss.backward()
    optimizer.step()
    truth.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration == 6:
        break
truth.finish(model.parameters())
