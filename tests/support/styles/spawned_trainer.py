"""The script itself trains nothing: all of it happens in one spawned process."""

import torch
from truth import Truth


def train(index, steps):
    torch.manual_seed(index)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = Truth()
    for x in torch.randn(steps, 8, 4):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2]).pow(2).mean()
        truth.micro_batch(loss)
        loss.backward()
        optimizer.step()
        truth.step()
    truth.finish(model.parameters())


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(5,), nprocs=1)
