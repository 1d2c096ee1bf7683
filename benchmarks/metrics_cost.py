"""What do reports cost a step?

`python -m benchmarks.metrics_cost` makes the same tiny training step in turn with an executor that
reports, to Ray's metrics and to `raydp-parallel status`, and with one that does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved
from raydp_parallel import DataParallel, Executor, Options

ROUNDS = 6000


def stepper(executor: Executor) -> Callable[[], None]:
    """A forward and a backward."""
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    x = torch.randn(4, 4)

    def step() -> None:
        model(x).sum().backward()

    return step


def run(effort: Effort) -> Report:
    """Cost of reports."""
    torch.set_num_threads(1)
    executors = {
        f"metrics {'on' if on else 'off'}": Executor(["cpu", "cpu"], options=Options(metrics=on))
        for on in (False, True)
    }
    rounds = effort.rounds(ROUNDS)
    medians = interleaved(
        {name: stepper(executor) for name, executor in executors.items()}, rounds, effort.warmup
    )
    for executor in executors.values():
        executor.close()
    asked = [
        Asked(
            "tiny step with metrics to one without",
            medians["metrics on"] / medians["metrics off"],
            1.02,
        )
    ]
    tables = [compared("a tiny step, 2 replicas", medians)]
    return Report(
        "metrics_cost", "What do reports cost a step?", tables, asked, {"median_ms": medians}
    )


if __name__ == "__main__":
    alone(run)
