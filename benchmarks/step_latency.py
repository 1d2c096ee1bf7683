"""What does a step cost beyond the two trips it cannot avoid?

`python -m benchmarks.step_latency` compares, interleaved, on the same two CPU replicas:
- two fan-out round trips of an empty method, the floor;
- one forward and backward of a tiny model;
- a forward with nothing changed under no_grad, against one empty round trip;
- a round trip over the direct line that carries next to nothing.
It then compares what a forward waits for to learn that a ResNet-50 did not change with what torch's own DataParallel
does for each replica (`_replicate_for_data_parallel` of all modules).
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import interleaved, keep, machine, table


def steps(replicas: int, rounds: int) -> dict[str, float]:
    """Step latency against empty round trips."""
    model = raydp_parallel.DataParallel(nn.Linear(4, 2), ["cpu"] * replicas)
    x = torch.randn(2 * replicas, 4)
    model(x)
    doors = [seat.door.actor for seat in model.executor.seats(model.device_ids)]

    def empty() -> None:
        ray.get([door.empty.remote() for door in doors])

    def two_trips() -> None:
        empty()
        empty()

    def step() -> None:
        model(x).sum().backward()

    def no_grad() -> None:
        with torch.no_grad():
            model(x)

    contenders = {"two empty round trips": two_trips, "forward + backward": step, "forward, no_grad": no_grad}
    contenders["one empty round trip"] = empty
    contenders["one trip over the direct line"] = model.executor.flush
    return interleaved(contenders, rounds)


def resnet_check(rounds: int) -> dict[str, float]:
    """The check for changes against torch's replication, on a ResNet-50 with 286 modules."""
    from transformers import ResNetConfig, ResNetForImageClassification

    net = ResNetForImageClassification(ResNetConfig()).eval()
    modules = [*net.modules()]
    executor = raydp_parallel.Executor((), options=raydp_parallel.Options(in_process=True))
    master = executor.master(net)
    master.sync()

    def torch_replica() -> None:
        for module in modules:
            module._replicate_for_data_parallel()

    return interleaved({f"torch, {len(modules)} modules": torch_replica, "our check": master.sync}, rounds, 20)


def main() -> dict[str, Any]:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {"step": steps(options.replicas, options.rounds), "resnet50_check": resnet_check(options.rounds // 4)}
    print(machine())
    for medians in results.values():
        print(table(medians), end="\n\n")
    keep("step_latency", {"replicas": options.replicas, "median_ms": results})
    raydp_parallel.shutdown()
    return results


if __name__ == "__main__":
    main()
