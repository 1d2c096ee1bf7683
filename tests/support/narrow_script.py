"""Run by test_faults_apart.py in its own process: hardly any room for what Ray keeps, and training
all the same.
"""

from __future__ import annotations

import sys

import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options


def train(executor: Executor) -> list[Tensor]:
    """Weights of 25 MB, which change with each step."""
    torch.manual_seed(0)
    model = DataParallel(
        nn.Sequential(nn.Linear(16, 200_000), nn.ReLU(), nn.Linear(200_000, 16)), executor=executor
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def main() -> None:
    """Train by the link that is named, and without processes, and compare."""
    torch.set_num_threads(1)
    # An object store for three updates of state: Ray has to write the fourth to a disk.
    settings = {
        "num_cpus": 1,
        "include_dashboard": False,
        "log_to_driver": False,
        "object_store_memory": 80 << 20,
    }
    ray.init(**settings)  # type: ignore[arg-type]
    with Executor(["cpu"] * 2, options=Options(link=sys.argv[1])) as executor:  # type: ignore[arg-type]
        found = train(executor)
        assert executor.stats().deaths == 0
    with Executor(["cpu"] * 2, options=Options(in_process=True, threads=1)) as local:
        expected = train(local)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    print("the same weights")
    raydp_parallel.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
