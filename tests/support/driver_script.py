"""Run by test_faults_apart.py in its own process: says which processes it started, and waits to be
killed.
"""

from __future__ import annotations

import time

import ray
import torch
from torch import nn

from raydp_parallel import DataParallel, Executor


def main() -> None:
    """Replicas with graphs and shared memory."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    executor = Executor(["cpu", "cpu"])
    out = DataParallel(nn.Linear(300, 3000), executor=executor)(torch.ones(400, 300))
    print(*(info.pid for info in executor.replicas()), flush=True)
    time.sleep(120)
    out.sum().backward()


if __name__ == "__main__":
    main()
