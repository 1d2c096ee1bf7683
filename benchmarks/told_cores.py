"""Does a step depend on how many CPUs Ray was told of?

`python -m benchmarks.told_cores` trains the small GPT-2 of `transformers` on two CPU replicas, in
two processes with a Ray each: one was told of the cores that the machine has, the other of twice as
many, as programs do that want more tasks at a time. Threads of replicas follow from the real cores,
so that both take the same time. Turns are those of `one_device`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import ray

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved, use_niceness
from benchmarks.nets import CASES, GPT2_SMALL, usable
from benchmarks.one_device import ROUNDS, step, turn

REPLICAS = 2
TRUE, TWICE = "as many CPUs as there are", "twice as many"
_LIMIT = 1.05


def serve(cpus: int, line: Connection) -> None:
    """Train in a Ray that was told of so many CPUs: one turn for each word that comes."""
    use_niceness()
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    model = raydp_parallel.DataParallel(CASES[GPT2_SMALL].make(), ["cpu"] * REPLICAS)
    run = step(GPT2_SMALL, model)
    with contextlib.suppress(EOFError):  # the other end failed
        while line.recv():
            line.send(turn(GPT2_SMALL, run))
        line.send([parameter.detach().numpy() for parameter in model.module.parameters()])
    raydp_parallel.shutdown()
    ray.shutdown()


@contextlib.contextmanager
def in_a_ray_told(cpus: int) -> Iterator[Connection]:
    """A process that trains when told."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(cpus, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def ask(line: Connection) -> float:
    """The seconds of a turn."""
    line.send(True)
    seconds: float = line.recv()
    return seconds


def weights(line: Connection) -> list[np.ndarray]:
    """End the training; returns what became of the weights."""
    line.send(False)
    found: list[np.ndarray] = line.recv()
    return found


def run(effort: Effort) -> Report:
    """Two Rays, told of different numbers of CPUs."""
    question = "Does a step depend on how many CPUs Ray was told of?"
    if not usable(GPT2_SMALL):
        notes = ["Left out: not installed: transformers"]
        return Report("told_cores", question, [], [], {}, notes)
    cores = os.cpu_count() or 1
    with in_a_ray_told(cores) as true, in_a_ray_told(2 * cores) as twice:
        contenders: dict[str, Callable[[], Any]] = {
            TRUE: lambda: ask(true),
            TWICE: lambda: ask(twice),
        }
        medians = interleaved(contenders, effort.rounds(ROUNDS[GPT2_SMALL]), warmup=1)
        if not all(map(np.array_equal, weights(true), weights(twice))):
            raise RuntimeError("different weights at the end")
    asked = Asked(
        f"{GPT2_SMALL}, Ray told of twice the CPUs: step to told of those there are",
        medians[TWICE] / medians[TRUE],
        _LIMIT,
    )
    table = compared(f"{GPT2_SMALL}: training step, {REPLICAS} replicas, by CPUs", medians)
    return Report("told_cores", question, [table], [asked], {"median_ms": medians})


if __name__ == "__main__":
    alone(run)
