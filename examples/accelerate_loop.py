"""A training loop on Hugging Face's ``accelerate``, with a wrapped model: ``prepare`` leaves it as
it is, and ``unwrap_model`` gives the module.

Output::

    loss 1.1438 -> 0.1516
    unwrapped: Sequential
"""

from __future__ import annotations

import command_line
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raydp_parallel import DataParallel


def main(device_ids: list[str | int] | None = None, epochs: int = 6) -> list[float]:
    """Trains, and returns the mean loss of each epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    points = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(points, points[:, :4].argmax(1)), batch_size=32, shuffle=True)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = DataParallel(net, device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(epochs):
        found = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        losses.append(sum(found) / len(found))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"unwrapped: {type(accelerator.unwrap_model(model)).__name__}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
