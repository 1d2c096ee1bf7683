"""Two wrapped nets that share the replicas: a Wasserstein GAN, with a gradient penalty that
needs second derivatives.

Output::

    distance 2.4135 -> 0.6386
"""

from __future__ import annotations

import command_line
import torch
from torch import nn

from raydp_parallel import DataParallel

BATCH = 32
NOISE = 4
TARGET = torch.tensor([2.0, -1.0])


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """How far the critic's slope between real and fake points is from one."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def train_critic(
    critic: nn.Module, optimizer: torch.optim.Optimizer, real: torch.Tensor, fake: torch.Tensor
) -> None:
    loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_generator(
    generator: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """One step of the generator, and the points it made."""
    fake = generator(torch.randn(BATCH, NOISE))
    loss = -critic(fake).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return fake.detach()


def main(device_ids: list[str | int] | None = None, steps: int = 40) -> list[float]:
    """Trains, and returns how far the centre of the generated points is from that of the real ones,
    step by step.
    """
    torch.manual_seed(0)
    generator = DataParallel(
        nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 2)), device_ids
    )
    critic = DataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), device_ids)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.005, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.03, betas=(0.5, 0.9))

    distances = []
    for _ in range(steps):
        real = TARGET + 0.3 * torch.randn(BATCH, 2)
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, NOISE))
        train_critic(critic, critic_optimizer, real, fake)
        fake = train_generator(generator, critic, generator_optimizer)
        distances.append((fake.mean(dim=0) - TARGET).norm().item())
    print(f"distance {distances[0]:.4f} -> {distances[-1]:.4f}")
    return distances


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
