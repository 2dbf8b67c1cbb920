"""Imports torch and runs a model, but has no optimizer and no backward."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
print("with gradients", model(torch.randn(8, 4)).sum().item().hex())
with torch.no_grad():
    print("without", model(torch.randn(8, 4)).sum().item().hex())
Truth().finish(model.parameters())
