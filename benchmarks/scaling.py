"""What does one more replica cost?

`python -m benchmarks.scaling` makes steps of a tiny model on 1 to 16 CPU replicas, one row each,
beside two fan-out round trips to as many plain Ray actors. With more replicas than cores this is
the driver's and the system's price for each, not a speed-up. The cost per added replica is the
slope of the straight line through the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import Effort, Report, Table, alone, interleaved
from benchmarks.peers import echo

COUNTS = (1, 2, 4, 8, 16)
ROUNDS = 120
STEP, FORWARD, TRIPS = "forward + backward", "forward, no_grad", "two empty Ray round trips"


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model(x).sum().backward()


@torch.no_grad()
def forward(model: nn.Module, x: Tensor) -> None:
    """Forward alone."""
    model(x)


def two_trips(actors: list[object]) -> None:
    """There and back, twice."""
    echo.fan_out(actors)
    echo.fan_out(actors)


def slope(points: dict[int, float]) -> float:
    """Milliseconds per replica."""
    return statistics.linear_regression([*points], [*points.values()]).slope


def run(effort: Effort) -> Report:
    """Scaling to 16 replicas."""
    counts = COUNTS if effort is not Effort.SMOKE else COUNTS[:2]
    net = nn.Linear(4, 2)
    actors = echo.start(counts[-1])
    contenders: dict[str, Callable[[], None]] = {}
    for count in counts:
        model, x = raydp_parallel.DataParallel(net, ["cpu"] * count), torch.randn(count, 4)
        contenders[f"{count} {STEP}"] = partial(step, model, x)
        contenders[f"{count} {FORWARD}"] = partial(forward, model, x)
        contenders[f"{count} {TRIPS}"] = partial(two_trips, actors[:count])
    medians = interleaved(contenders, effort.rounds(ROUNDS), effort.warmup)
    echo.end(actors)
    by_name = {
        name: {count: medians[f"{count} {name}"] for count in counts}
        for name in (STEP, FORWARD, TRIPS)
    }
    rows: list[list[object]] = [
        [str(count), *(points[count] for points in by_name.values())] for count in counts
    ]
    rows.append(["each more", *(slope(points) for points in by_name.values())])
    table = Table("a tiny model, one row for each replica, ms", ["replicas", *by_name], rows)
    data = {
        name: {str(count): ms for count, ms in points.items()} for name, points in by_name.items()
    }
    return Report("scaling", "What does one more replica cost?", [table], [], {"median_ms": data})


if __name__ == "__main__":
    alone(run)
