"""Train a small convolutional net on scikit-learn's handwritten digits, in plain fp32.

    python samples/digits.py [--epochs N] [--accumulate N]

Prints the accuracy on held-out images and a hash of the final weights: the same arguments give
the same hash on the same machine. `--accumulate` counts windows across epochs and drops what is
left at the very end.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def build_model() -> nn.Module:
    """Maps images (b, 1, 8, 8) with values in 0..1 to logits (b, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test on, always the same ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images whose digit the model names."""
    model.eval()
    correct = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return correct


def hash_weights(model: nn.Module) -> str:
    """Hex sha256 over every tensor of the state dict, in order."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small net on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    train, test = load_images()
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    batches = 0
    for epoch in range(1, args.epochs + 1):
        epoch_loss = 0.0
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            (loss / args.accumulate).backward()
            epoch_loss += loss.item()
            batches += 1
            if batches % args.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}  loss {epoch_loss / len(loader):.4f}", flush=True)

    print(f"test accuracy {accuracy(model, *test.tensors):.4f}")
    print(f"weights {hash_weights(model)}")


if __name__ == "__main__":
    main()
