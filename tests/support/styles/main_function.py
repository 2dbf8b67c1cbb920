"""main(), argparse, DataLoader, clipping and a cosine schedule: the usual script."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from truth import Truth


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    truth = Truth()
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            truth.micro_batch(loss)
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            truth.step()
            scheduler.step()
        print("epoch", epoch, "lr", scheduler.get_last_lr()[0].hex())
    truth.finish(model.parameters())


if __name__ == "__main__":
    main()
