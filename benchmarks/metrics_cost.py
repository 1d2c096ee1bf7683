"""What do reports cost a step?

`python -m benchmarks.metrics_cost` makes the same tiny training step in turn with an executor that reports, to Ray's
metrics and to `raydp-parallel status`, and with one that does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import interleaved, keep, machine, table
from raydp_parallel import DataParallel, Executor, Options


def stepper(executor: Executor) -> Callable[[], None]:
    """A forward and a backward."""
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    x = torch.randn(4, 4)

    def step() -> None:
        model(x).sum().backward()

    return step


def main() -> dict[str, Any]:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    executors = {
        f"metrics {'on' if on else 'off'}": Executor(["cpu", "cpu"], options=Options(metrics=on)) for on in (0, 1)
    }
    medians = interleaved({name: stepper(executor) for name, executor in executors.items()}, options.rounds, 200)
    print(machine())
    print(table(medians))
    keep("metrics_cost", {"replicas": 2, "rounds": options.rounds, "median_ms": medians})
    for executor in executors.values():
        executor.close()
    raydp_parallel.shutdown()
    return medians


if __name__ == "__main__":
    main()
