"""A loop at module level; torch is imported late, inside a function."""

from truth import Truth


def make():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 8, 4)


truth = Truth()
model, optimizer, batches = make()
for x in batches:
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
