"""The quickstart with its optimizer in the replicas: each trains its own copy of the weights, and
the master copy is fetched when it is asked for.

Output::

    Training in 2 replicas, devices ['cpu', 'cpu']
    After 100 steps the master copy is 100 steps behind
    state_dict() fetched 6 tensors; it is 0 steps behind
    loss 0.6848 -> 0.1576
"""

from __future__ import annotations

import command_line
import torch
from quickstart import points
from torch import nn

from raydp_parallel import DataParallel

STEPS = 100


def main(device_ids: list[str | int] | None = None) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DataParallel(net, device_ids)
    print(f"Training in {len(model.device_ids)} replicas, devices {model.device_ids}")

    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    losses = []
    for _ in range(STEPS):
        where, arms = points()
        scores = model(where)
        loss = nn.functional.cross_entropy(scores, arms.to(scores.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    behind = model.stats().steps_behind
    print(f"After {STEPS} steps the master copy is {behind} steps behind")
    weights = model.state_dict()
    behind = model.stats().steps_behind
    print(f"state_dict() fetched {len(weights)} tensors; it is {behind} steps behind")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
