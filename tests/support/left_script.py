"""Run by test_faults_apart.py in its own process: the cluster is left while replicas run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, ParallelError


class Waits(nn.Module):
    """Says that it began, and waits."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        path = Path(self.folder, "wait")
        while path.exists():
            Path(self.folder, "begun").touch()
            time.sleep(0.01)
        return x * self.weight


def main() -> None:
    """One call that loses its cluster, and one that starts the next."""
    folder = Path(sys.argv[1])
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    model = DataParallel(Waits(str(folder)), ["cpu", "cpu"])
    x = torch.arange(4.0)
    model(x)
    (folder / "wait").touch()

    def leave() -> None:
        while not (folder / "begun").exists():
            time.sleep(0.01)
        ray.shutdown()

    thread = threading.Thread(target=leave)
    thread.start()
    try:
        model(x)
    except ParallelError as error:
        print(type(error).__name__, error)
    thread.join()
    (folder / "wait").unlink()
    model(x).sum().backward()
    assert model.module.weight.grad is not None
    print("the next use works:", model.module.weight.grad.tolist())
    raydp_parallel.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
