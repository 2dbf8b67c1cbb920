"""Evaluation forgets no_grad() and eval(), even between the micro-batches of a window."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
held_out = torch.randn(8, 4)
truth = Truth()


def loss_of(x):
    return (model(x) - x[:, :2]).pow(2).mean()


print("before", loss_of(held_out).item().hex())
for _ in range(4):
    optimizer.zero_grad()
    for x in torch.randn(2, 8, 4):
        loss = loss_of(x) / 2
        truth.micro_batch(loss)
        loss.backward()
        print("held out", loss_of(held_out).item().hex())
    optimizer.step()
    truth.step()
    print("after the step", loss_of(held_out).item().hex())
truth.finish(model.parameters())
