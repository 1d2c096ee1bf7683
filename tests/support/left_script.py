"""Run by test_faults_apart.py in its own process: the cluster is left while replicas run."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from harness import Apply, ones
from torch import Tensor

import raydp_parallel
from raydp_parallel import DataParallel, ParallelError


def waits(net: Any, x: Tensor) -> Tensor:
    """Says that it began, and waits."""
    path = Path(net.folder, "wait")
    while path.exists():
        Path(net.folder, "begun").touch()
        time.sleep(0.01)
    return x * net.weight


def main() -> None:
    """One call that loses its cluster, and one that starts the next."""
    folder = Path(sys.argv[1])
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    model = DataParallel(Apply(waits, weight=ones(1), folder=str(folder)), ["cpu", "cpu"])
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
