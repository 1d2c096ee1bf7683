"""How long does a step take beyond the two trips that it cannot avoid?

`python -m benchmarks.step_latency` compares, interleaved, on two CPU replicas and two plain Ray
actors: two fan-out round trips of an empty method, which is the floor by Ray's calls; one forward
and backward of a tiny model; a forward under no_grad with nothing changed, beside one empty round
trip.
"""

from __future__ import annotations

import ray
import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved
from benchmarks.peers import Echo, fan_out

REPLICAS = 2
ROUNDS = 400
TRIPS, STEP = "two empty round trips", "forward + backward"


def steps(rounds: int, warmup: int = 5) -> dict[str, float]:
    """Milliseconds of steps and of empty round trips."""
    model = raydp_parallel.DataParallel(nn.Linear(4, 2), ["cpu"] * REPLICAS)
    x = torch.randn(2 * REPLICAS, 4)
    model(x)
    actors = [Echo.remote() for _ in range(REPLICAS)]

    def two_trips() -> None:
        fan_out(actors)
        fan_out(actors)

    def step() -> None:
        model(x).sum().backward()

    def no_grad() -> None:
        with torch.no_grad():
            model(x)

    contenders = {TRIPS: two_trips, STEP: step, "forward, no_grad": no_grad}
    contenders["one empty round trip"] = lambda: fan_out(actors)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    medians = interleaved(contenders, rounds, warmup)
    torch.set_num_threads(threads)
    for actor in actors:
        ray.kill(actor)
    return medians


def run(effort: Effort) -> Report:
    """Step latency."""
    data = steps(effort.rounds(ROUNDS), effort.warmup)
    table = compared(f"tiny step, {REPLICAS} replicas", data)
    asked = Asked("tiny step to two fan-out round trips", data[STEP] / data[TRIPS], 1.3)
    question = "How long does a step take beyond the two trips that it cannot avoid?"
    return Report("step_latency", question, [table], [asked], {"median_ms": data})


if __name__ == "__main__":
    alone(run)
