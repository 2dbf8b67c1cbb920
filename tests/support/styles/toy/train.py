"""`python -m toy.train`: a package whose modules import each other relatively."""

import sys

import torch
from truth import Truth

from .network import Network  # noqa: TID252


def train(steps):
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    truth = Truth()
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
        optimizer.zero_grad()
        truth.micro_batch(loss)
        loss.backward()
        optimizer.step()
        truth.step()
    truth.finish(model.parameters())


if __name__ == "__main__":
    print(__name__, __package__, __spec__.name, sys.argv[1:])
    train(int(sys.argv[1]))
