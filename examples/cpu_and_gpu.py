"""The first part of a model, an embedding, stays on the driver's CPU; the second part is wrapped.
Both are trained.

Output::

    loss 1.3791 -> 0.0046
"""

from __future__ import annotations

import command_line
import torch
from torch import nn

from raydp_parallel import DataParallel

WORDS = 100
CLASSES = 4


class Net(nn.Module):
    def __init__(self, device_ids: list[str | int] | None):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.rest = DataParallel(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES)), device_ids
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.rest(self.embedding(words)).to(words.device)


def main(device_ids: list[str | int] | None = None, steps: int = 30) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    words = torch.arange(WORDS)
    classes = torch.randint(CLASSES, (WORDS,))
    model = Net(device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(words), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
