"""One optimizer per parameter, stepped inside backward as soon as its gradient is there."""

import torch
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}
truth = Truth()
order = {}


def update(p):
    optimizers[p].step()
    truth.step(optimizer=order.setdefault(p, len(order)))
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for x in torch.randn(5, 8, 4):
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
truth.finish(model.parameters())
