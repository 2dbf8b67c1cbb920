"""Sparse gradients of an embedding, under SparseAdam; the dense rest under Adam."""

import torch
from truth import Truth

torch.manual_seed(0)
embedding = torch.nn.Embedding(10, 4, sparse=True)
head = torch.nn.Linear(4, 2)
sparse = torch.optim.SparseAdam(embedding.parameters(), lr=1e-2)
dense = torch.optim.Adam(head.parameters(), lr=1e-2)
truth = Truth()
for ids in torch.randint(0, 10, (5, 8)):
    sparse.zero_grad()
    dense.zero_grad()
    loss = torch.nn.functional.cross_entropy(head(embedding(ids)), ids % 2)
    truth.micro_batch(loss)
    loss.backward()
    sparse.step()
    truth.step(optimizer=0)
    dense.step()
    truth.step(optimizer=1)
truth.finish([*embedding.parameters(), *head.parameters()])
