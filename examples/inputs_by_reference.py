"""Neither batches nor outputs pass through your process: tasks of Ray make the batches, and the
replicas compute the loss.

Output::

    Training in 2 replicas, devices ['cpu', 'cpu']
    A forward moves 4096 bytes here, with references 256 bytes
    loss 0.6823 -> 0.0980
"""

from __future__ import annotations

from operator import itemgetter

import command_line
import ray
import torch
from torch import nn

from raydp_parallel import ChunkRefs, DataParallel

STEPS = 100
ROWS = 128


@ray.remote(num_cpus=0)
def chunk(number: int) -> dict[str, torch.Tensor]:
    """A part of a batch, made where Ray has room: points on two spirals, and the arm of each."""
    generator = torch.Generator().manual_seed(number)
    arms = torch.arange(ROWS) % 2
    radius = torch.rand(ROWS, generator=generator)
    angle = 6 * radius + torch.pi * arms
    return {"points": torch.stack([radius * angle.cos(), radius * angle.sin()], 1), "arms": arms}


def carried(model: DataParallel) -> int:
    """Bytes of tensors that went to replicas and came back so far."""
    return sum(replica.bytes_in + replica.bytes_out for replica in model.stats().replicas)


def main(device_ids: list[str | int] | None = None) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DataParallel(net, device_ids)
    count = len(model.device_ids)
    print(f"Training in {count} replicas, devices {model.device_ids}")

    criterion_model = model.with_loss(nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def batch(step: int) -> tuple[ChunkRefs, ChunkRefs]:
        """References to what tasks make from now on: the points of a step's batch, and the arms."""
        refs = [chunk.remote(count * step + k) for k in range(count)]
        return ChunkRefs(refs, itemgetter("points")), ChunkRefs(refs, itemgetter("arms"))

    losses = []
    following = batch(0)
    for step in range(STEPS):
        points, arms = following
        following = batch(step + 1)  # made while this one is computed
        loss = criterion_model(points, arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    moved = []
    with torch.no_grad():
        for evaluate in (
            criterion_model,
            criterion_model,
            lambda *_: model(torch.rand(2 * ROWS, 2)),
        ):
            before = carried(model)
            evaluate(*following)  # the first one brings the weights of the last step, too
            moved.append(carried(model) - before)
    print(f"A forward moves {moved[2]} bytes here, with references {moved[1]} bytes")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
