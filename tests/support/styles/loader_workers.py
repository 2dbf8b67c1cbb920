"""DataLoader workers that live on from one epoch to the next.

python loader_workers.py fork|spawn
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from truth import Truth


class Waves(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 4) * index + torch.rand(4)  # the worker's own random numbers
        return x, x.sin()


def main(method):
    torch.manual_seed(0)
    loader = DataLoader(
        Waves(),
        batch_size=4,
        shuffle=True,
        num_workers=2 if method == "fork" else 1,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    truth = Truth()
    for _ in range(2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            truth.micro_batch(loss)
            loss.backward()
            optimizer.step()
            truth.step()
    truth.finish(model.parameters())


if __name__ == "__main__":
    main(sys.argv[1])
