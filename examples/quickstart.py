"""Trains a small model on every GPU of the Ray cluster, or else on two CPU replicas; shows what
each replica did.

Output::

    Final loss 0.1258, at the start 0.6848
"""

from __future__ import annotations

import command_line
import torch
from torch import nn

from raydp_parallel import DataParallel

STEPS = 100
BATCH = 256


def spirals(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on the two arms of a spiral, and the arm each one is on."""
    arms = torch.arange(rows) % 2
    radius = torch.rand(rows)
    angle = 6 * radius + torch.pi * arms
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.01 * torch.randn_like(points), arms


def parallel(net: nn.Module, device_ids: list[str | int] | None) -> DataParallel:
    """The net on the given devices; with none given on every GPU, or on two CPU replicas where
    there is no GPU.
    """
    model = DataParallel(net, device_ids)
    if not model.device_ids:
        print("No GPU was found: two CPU replicas instead")
        model = DataParallel(net, ["cpu", "cpu"])
    return model


def main(device_ids: list[str | int] | None = None) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = parallel(net, device_ids)
    print(f"Training on {len(model.device_ids)} replicas, devices {model.device_ids}")

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        points, arms = spirals(BATCH)
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, arms.to(scores.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    print("\nWhat each replica did:")
    print(model.stats())
    print(f"\nFinal loss {losses[-1]:.4f}, at the start {losses[0]:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="none"))
