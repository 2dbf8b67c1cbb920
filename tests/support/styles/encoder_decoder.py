"""Two modules called one after the other, one optimizer over both, two micro-batches a window."""

import itertools

import torch
from torch import nn
from truth import Truth

torch.manual_seed(0)
encoder = nn.GRU(4, 6, batch_first=True)
decoder = nn.Linear(6, 4)
parameters = list(itertools.chain(encoder.parameters(), decoder.parameters()))
optimizer = torch.optim.Adam(parameters, lr=1e-2)
truth = Truth()
for _ in range(4):
    optimizer.zero_grad()
    for _ in range(2):
        x = torch.randn(3, 5, 4)
        states, _ = encoder(x)
        loss = (decoder(states) - x).abs().mean() / 2
        truth.micro_batch(loss)
        loss.backward()
    optimizer.step()
    truth.step()
truth.finish(parameters)
