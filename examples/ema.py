"""An exponential moving average of the weights, kept in a deep copy of the wrapped model, and
evaluated on the same replicas.

Output::

    loss 0.8279 -> 0.0924
    loss of the averaged weights 0.0189
"""

from __future__ import annotations

import copy

import command_line
import torch
from torch import nn

from raydp_parallel import DataParallel

DECAY = 0.95


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module) -> None:
    """Move the averaged weights towards those of the model; buffers are copied."""
    pairs = zip(averaged.parameters(), model.parameters(), strict=True)
    for kept, now in pairs:
        kept.lerp_(now, 1 - DECAY)
    for kept, now in zip(averaged.buffers(), model.buffers(), strict=True):
        kept.copy_(now)


def main(device_ids: list[str | int] | None = None, steps: int = 100) -> list[float]:
    """Trains with noisy targets, and returns the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
    model = DataParallel(net, device_ids)
    averaged = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    direction = torch.randn(8, 1)

    losses = []
    for _ in range(steps):
        x = torch.randn(64, 8)
        target = (x @ direction).tanh() + 0.2 * torch.randn(64, 1)
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average(averaged, model)
        losses.append(loss.item())
    x = torch.randn(512, 8)
    with torch.no_grad():
        smooth = nn.functional.mse_loss(averaged(x), (x @ direction).tanh()).item()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"loss of the averaged weights {smooth:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
