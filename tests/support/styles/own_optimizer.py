"""An Optimizer class of the user's own, with a step of its own, and hooks registered on it."""

import torch
from truth import Truth


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = SignDescent(model.parameters())
optimizer.register_step_pre_hook(lambda *_: print("before"))
optimizer.register_step_post_hook(lambda *_: print("after"))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
truth = Truth()
for x in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).abs().mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
    scheduler.step()
truth.finish(model.parameters())
