"""DDP's processes that train a perceptron, a step when told, for what `faults` measures of
a death.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.nets import perceptron, vectors


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step of a plain loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def checksum(model: nn.Module) -> float:
    """Of all weights."""
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def ddp_worker(
    rank: int, world: int, threads: int, width: int, rows: int, file: str, pipe: Any
) -> None:
    """One process of DDP: a step for each word that comes, the checksum at the end."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    x, y = (part.chunk(world)[rank] for part in vectors(width, rows))
    model = DistributedDataParallel(perceptron(width))
    step = stepper(model, x, y)
    while pipe.recv():
        step()
        pipe.send(None)
    pipe.send(checksum(model))
    dist.destroy_process_group()


class Ddp:
    """DDP's processes, which make a step when told."""

    def __init__(self, world: int, threads: int, width: int, rows: int) -> None:
        self.pipes, self.processes = [], []
        file = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(world):
            ours, theirs = mp.get_context("spawn").Pipe()
            arguments = (rank, world, threads, width, rows, file, theirs)
            process = mp.get_context("spawn").Process(target=ddp_worker, args=arguments)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def step(self) -> None:
        """One step of all."""
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def close(self) -> float:
        """End them; returns the checksum of their weights."""
        for pipe in self.pipes:
            pipe.send(False)
        sums = [pipe.recv() for pipe in self.pipes]
        for process in self.processes:
            process.join()
        return float(sums[0])
