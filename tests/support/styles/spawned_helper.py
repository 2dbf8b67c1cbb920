"""The script trains, and in the middle a spawned process trains a model of its own."""

import multiprocessing

import torch
from truth import Truth


def train(steps, truth=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(steps, 8, 4):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2]).pow(2).mean()
        if truth:
            truth.micro_batch(loss)
        loss.backward()
        optimizer.step()
        if truth:
            truth.step()
    return model


def in_the_child(queue):
    queue.put(train(7)(torch.ones(1, 4)).sum().item())


def main():
    truth = Truth()
    model = train(3, truth)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_the_child, args=(queue,))
    child.start()
    print("child", queue.get().hex())
    child.join()
    truth.finish(model.parameters())


if __name__ == "__main__":
    main()
