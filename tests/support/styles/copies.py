"""EMA, deepcopy, pickle and torch.save of the model in mid-training; the copies are called, too."""

import copy
import io
import pickle

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from truth import Truth

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = Truth()
for step, x in enumerate(torch.randn(6, 8, 4)):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).pow(2).mean()
    truth.micro_batch(loss)
    loss.backward()
    optimizer.step()
    truth.step()
    average.update_parameters(model)
    if step == 2:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twins = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
            copy.deepcopy(average),
        ]
        optimizer_twin = pickle.loads(pickle.dumps(optimizer))
        print(sorted(optimizer_twin.state_dict()["state"]))
        for twin in twins:  # gradients on, training mode, but no backward follows
            print(type(twin).__name__, twin(x).sum().item().hex())
with torch.no_grad():
    print("average", average(torch.ones(1, 4)).sum().item().hex())
truth.finish([*model.parameters(), *average.parameters()])
