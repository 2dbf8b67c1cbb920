"""Fine-tuning with the model in eval mode throughout: no forward looks like training."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
model.eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = Truth()
for _ in range(4):
    optimizer.zero_grad()
    for x in torch.randn(2, 8, 4):
        loss = (model(x) - x[:, :2]).pow(2).mean() / 2
        truth.micro_batch(loss)
        loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
