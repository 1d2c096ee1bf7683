"""What does a step cost beyond the two trips it cannot avoid?

`python -m benchmarks.step_latency` compares, interleaved, on two CPU replicas and two plain Ray
actors:
- two fan-out round trips of an empty method, the floor;
- one forward and backward of a tiny model;
- a forward with nothing changed under no_grad, against one empty round trip;
- a round trip over the direct line that carries next to nothing.
It then compares what a forward waits for to learn that a ResNet-50 did not change with what torch's
own DataParallel does for each replica (`_replicate_for_data_parallel` of all modules).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved
from benchmarks.peers import echo

REPLICAS = 2
ROUNDS = 400
TRIPS, STEP = "two empty round trips", "forward + backward"


def steps(effort: Effort) -> dict[str, float]:
    """Step latency against empty round trips."""
    model = raydp_parallel.DataParallel(nn.Linear(4, 2), ["cpu"] * REPLICAS)
    x = torch.randn(2 * REPLICAS, 4)
    model(x)
    actors = echo.start(REPLICAS)

    def two_trips() -> None:
        echo.fan_out(actors)
        echo.fan_out(actors)

    def step() -> None:
        model(x).sum().backward()

    def no_grad() -> None:
        with torch.no_grad():
            model(x)

    contenders = {TRIPS: two_trips, STEP: step, "forward, no_grad": no_grad}
    contenders["one empty round trip"] = lambda: echo.fan_out(actors)
    contenders["one trip over the direct line"] = model.executor.flush
    medians = interleaved(contenders, effort.rounds(ROUNDS), effort.warmup)
    echo.end(actors)
    return medians


def resnet_check(effort: Effort) -> dict[str, float]:
    """The check for changes against torch's replication, on a ResNet-50 with 286 modules."""
    from transformers import ResNetConfig, ResNetForImageClassification  # optional

    net = ResNetForImageClassification(ResNetConfig()).eval()
    modules = [*net.modules()]
    executor = raydp_parallel.Executor((), options=raydp_parallel.Options(in_process=True))
    tracker = executor.tracker(net)
    tracker.sync()

    def torch_replica() -> None:
        for module in modules:
            module._replicate_for_data_parallel()

    contenders = {f"torch, {len(modules)} modules": torch_replica, "our check": tracker.sync}
    return interleaved(contenders, effort.rounds(ROUNDS // 4), effort.warmup)


def run(effort: Effort) -> Report:
    """Step latency."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = {"step": steps(effort)}
    tables = [compared(f"tiny step, {REPLICAS} replicas", data["step"])]
    notes = []
    if effort is Effort.SMOKE:
        notes.append("The check of a ResNet-50 is left out")
    elif importlib.util.find_spec("transformers") is not None:
        data["resnet50_check"] = resnet_check(effort)
        tables.append(compared("learning that a ResNet-50 did not change", data["resnet50_check"]))
    else:
        notes.append("The check of a ResNet-50 is left out: not installed: transformers")
    torch.set_num_threads(threads)
    asked = [
        Asked("tiny step to two fan-out round trips", data["step"][STEP] / data["step"][TRIPS], 1.2)
    ]
    question = "What does a step cost beyond the two trips it cannot avoid?"
    return Report("step_latency", question, tables, asked, {"median_ms": data}, notes)


if __name__ == "__main__":
    alone(run)
