"""Only the middle block of a model is wrapped; the layers before and after it stay in the driver.
All are trained.

Output::

    loss 1.0870 -> 0.0394
"""

from __future__ import annotations

import command_line
import torch
from torch import nn

from raydp_parallel import DataParallel


class Net(nn.Module):
    def __init__(self, device_ids: list[str | int] | None):
        super().__init__()
        block = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
        self.first = nn.Linear(10, 20)
        self.block = DataParallel(block, device_ids)
        self.last = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


def main(device_ids: list[str | int] | None = None, steps: int = 30) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    y = x.square().mean(dim=1, keepdim=True)
    model = Net(device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
