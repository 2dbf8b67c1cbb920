"""No AMP, four micro-batches per update; each epoch ends with a window of two."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from truth import Truth

torch.manual_seed(0)
x = torch.randn(40, 4)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = Truth()
for _ in range(2):
    for i, (inputs, targets) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(inputs), targets) / 4
        truth.micro_batch(loss)
        loss.backward()
        if (i + 1) % 4 == 0 or i + 1 == len(loader):
            optimizer.step()
            truth.step()
            optimizer.zero_grad()
truth.finish(model.parameters())
