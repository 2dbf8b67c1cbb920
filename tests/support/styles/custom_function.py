"""A custom autograd Function in the model, and a hook on its output's gradient."""

import torch
from truth import Truth


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    out = Cube.apply(model(x))
    out.register_hook(lambda gradient: gradient.clamp(-1, 1))
    loss = (out - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
truth.finish(model.parameters())
