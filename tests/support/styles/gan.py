"""A GAN: two networks, two optimizers, one scaler; G's loss leaves gradients in D as well."""

import torch
import torch.nn.functional as F
from torch import nn
from truth import Truth, changed, copy_of

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-4)
ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
truth = Truth()
for real in torch.randn(5, 8, 4):
    noise = torch.randn(8, 2)

    optimizer_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = generator(noise)
        loss_d = F.binary_cross_entropy_with_logits(
            discriminator(real), ones
        ) + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    truth.micro_batch(loss_d)
    scaler.scale(loss_d).backward()
    before = copy_of(discriminator.parameters())
    scaler.step(optimizer_d)
    truth.step(applied=changed(discriminator.parameters(), before), optimizer=0)

    optimizer_g.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
    truth.micro_batch(loss_g)
    scaler.scale(loss_g).backward()
    before = copy_of(generator.parameters())
    scaler.step(optimizer_g)
    truth.step(applied=changed(generator.parameters(), before), optimizer=1)

    scaler.update()
    print("scale", scaler.get_scale())
truth.finish([*generator.parameters(), *discriminator.parameters()])
