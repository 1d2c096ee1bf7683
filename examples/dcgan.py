"""A DCGAN after the public program: two wrapped convolutional nets that share the replicas, binary
cross entropy, three backward passes per step.

Output::

    distance 0.9567 -> 0.0551
"""

from __future__ import annotations

import command_line
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel

BATCH = 32
NOISE = 16
SIDE = 16


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(0),
    )


def initialise(module: nn.Module) -> None:
    """The weights that DCGAN's authors begin with."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def blobs(count: int) -> Tensor:
    """Images of a bright spot near the middle, from -1 to 1."""
    grid = torch.arange(SIDE) - (SIDE - 1) / 2
    centre = torch.randn(count, 2, 1, 1)
    far = (grid.view(SIDE, 1) - centre[:, :1]).square() + (grid - centre[:, 1:]).square()
    return 2 * (-far / 12).exp() - 1


def main(device_ids: list[str | int] | None = None, steps: int = 60) -> list[float]:
    """Trains, and returns how far the mean generated image is from the mean real one, step by
    step.
    """
    torch.manual_seed(0)
    net_g = DataParallel(generator().apply(initialise), device_ids)
    net_d = DataParallel(discriminator().apply(initialise), device_ids)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.002, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.001, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)
    mean = blobs(2048).mean(0)

    distances = []
    for _ in range(steps):
        fake = net_g(torch.randn(BATCH, NOISE, 1, 1))
        optimizer_d.zero_grad()
        criterion(net_d(blobs(BATCH)), ones).backward()
        criterion(net_d(fake.detach()), zeros).backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        criterion(net_d(fake), ones).backward()
        optimizer_g.step()

        distances.append((fake.detach().mean(0) - mean).abs().mean().item())
    print(f"distance {distances[0]:.4f} -> {min(distances[-10:]):.4f}")
    return distances


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
