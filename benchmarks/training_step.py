"""How fast is a training step, beside one process with all threads and beside DDP?

`python -m benchmarks.training_step` trains the same net in turn, one step each, on as many CPU replicas as DDP has
processes, with the cores shared among them: a small perceptron (2.1 M parameters, batch 64) and a larger one (16.8 M,
batch 256). The last column is the ratio to DDP over gloo. At the end all hold the same weights, which is checked.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import raydp_parallel
from benchmarks.measure import interleaved, keep, machine

CASES = {"MLP 2.1 M, batch 64": (1024, 64), "MLP 16.8 M, batch 256": (2896, 256)}


def make(width: int) -> nn.Module:
    """A perceptron with two square layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def batch(width: int, rows: int) -> tuple[Tensor, Tensor]:
    """The same rows for everybody."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


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


def ddp_worker(rank: int, world: int, threads: int, width: int, rows: int, file: str, pipe: Any) -> None:
    """One process of DDP: a step for each word that comes, the checksum at the end."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    x, y = (part.chunk(world)[rank] for part in batch(width, rows))
    model = DistributedDataParallel(make(width))
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


def measure(width: int, rows: int, world: int, rounds: int) -> dict[str, float]:
    """Milliseconds per step of each, in one interleaved run."""
    x, y = batch(width, rows)
    plain, wrapped = make(width), make(width)
    model = raydp_parallel.DataParallel(wrapped, ["cpu"] * world)
    threads = max(1, (os.cpu_count() or 1) // world)
    ddp = Ddp(world, threads, width, rows)
    steps = {"DDP gloo": ddp.step, "raydp_parallel": stepper(model, x, y), "one process": stepper(plain, x, y)}
    medians = interleaved(steps, rounds)
    sums = [ddp.close(), checksum(wrapped), checksum(plain)]
    assert max(sums) - min(sums) < 1e-6 * max(sums), f"different weights: {sums}"
    return medians


def main() -> dict[str, Any]:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    results = {}
    print(machine())
    for name, (width, rows) in CASES.items():
        results[name] = medians = measure(width, rows, options.replicas, options.rounds)
        print(name)
        for peer, ms in medians.items():
            print(f"  {peer.ljust(15)} {ms:9.2f} ms  {ms / medians['DDP gloo']:6.2f} x")
    keep("training_step", {"replicas": options.replicas, "median_ms": copy.deepcopy(results)})
    raydp_parallel.shutdown()
    return results


if __name__ == "__main__":
    main()
