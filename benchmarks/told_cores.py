"""Does a step depend on how many CPUs Ray was told of?

`python -m benchmarks.told_cores` trains the small GPT-2 of `transformers` on two CPU replicas, in
two processes with a Ray each: one was told of the cores that the machine has, the other of twice as
many, as programs do that want more tasks at a time. Threads of replicas follow from the real cores,
so that both take the same time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import ray

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, alone, compared, interleaved, use_niceness
from benchmarks.nets import CASES, GPT2_SMALL, usable
from benchmarks.one_device import ROUNDS, turn
from benchmarks.peers import stepper, weights

REPLICAS = 2
TRUE, TWICE = "as many CPUs as there are", "twice as many"
_LIMIT = 1.05


def serve(cpus: int, line: Connection) -> None:
    """Train in a Ray that was told of so many CPUs: a turn for each True, the weights for False."""
    use_niceness()
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    model = raydp_parallel.DataParallel(CASES[GPT2_SMALL].make(), ["cpu"] * REPLICAS)
    run = stepper(GPT2_SMALL, model)
    while line.recv():
        line.send(turn(GPT2_SMALL, run))
    line.send(weights(model.module))
    raydp_parallel.shutdown()


def run(effort: Effort) -> Report:
    """Two Rays, told of different numbers of CPUs."""
    question = "Does a step depend on how many CPUs Ray was told of?"
    if not usable(GPT2_SMALL):
        return Report("told_cores", question, [], [], {}, ["Not installed: transformers"])
    context, cores = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    lines: dict[str, Connection] = {}
    for name, cpus in ((TRUE, cores), (TWICE, 2 * cores)):
        lines[name], there = context.Pipe()
        context.Process(target=serve, args=(cpus, there)).start()

    def ask(line: Connection, further: bool) -> Any:
        line.send(further)
        return line.recv()

    turns: dict[str, Callable[[], Any]] = {n: partial(ask, one, True) for n, one in lines.items()}
    medians = interleaved(turns, effort.rounds(ROUNDS[GPT2_SMALL]), warmup=1)
    if ask(lines[TRUE], False) != ask(lines[TWICE], False):
        raise RuntimeError("different weights at the end")
    what = f"{GPT2_SMALL}, Ray told of twice the CPUs: step to told of those there are"
    table = compared(f"{GPT2_SMALL}: training step, {REPLICAS} replicas, by CPUs", medians)
    asked = Asked(what, medians[TWICE] / medians[TRUE], _LIMIT)
    return Report("told_cores", question, [table], [asked], {"median_ms": medians})


if __name__ == "__main__":
    alone(run)
