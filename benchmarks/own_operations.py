"""A user's process, for `own_process`: it times operations that have nothing to do with replicas.

It imports this package only if it is to have replicas.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.nets import perceptron, vectors

PLAIN, IDLE, CLOSED = "without the package", "idle replicas", "after close()"

ANSWER = "answer: "
"""What an answer begins with: Ray prints lines of its own."""
TIMES, STEPS = 100, 5

Operation = Callable[[], object]


def add() -> Operation:
    """The smallest sum that torch shares among threads, and a bit."""
    return partial(torch.add, torch.ones(40_000), torch.ones(40_000), out=torch.empty(40_000))


def softmax() -> Operation:
    """Over rows of a thousand classes."""
    return partial(torch.softmax, torch.randn(64, 1000), 1)


def layer_norm() -> Operation:
    """Over rows of 512."""
    return partial(F.layer_norm, torch.randn(128, 512), (512,))


def mlp_step() -> Operation:
    """A step of a plain loop, with Adam."""
    net, (x, y) = perceptron(256), vectors(256, 64)
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


OPERATIONS: dict[str, tuple[Callable[[], Operation], int]] = {
    "add of 40,000": (add, TIMES),
    "softmax 64 x 1000": (softmax, TIMES),
    "layer norm 128 x 512": (layer_norm, TIMES),
    "MLP step with Adam": (mlp_step, STEPS),
}
"""What makes each operation, and how often it runs in a turn."""


def median(work: Operation, times: int) -> float:
    """The median seconds of a piece of work."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def trained(address: str) -> Operation:
    """Start two CPU replicas and train some steps; returns what closes them."""
    import ray

    import raydp_parallel

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    executor = raydp_parallel.Executor(["cpu", "cpu"])
    model, (x, y) = (
        raydp_parallel.DataParallel(perceptron(256), executor=executor),
        vectors(256, 64),
    )
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
    return executor.close


def main(kind: str, address: str) -> None:
    """For the name of an operation in each line that comes, say its seconds."""
    close = trained(address) if kind != PLAIN else None
    if close is not None and kind == CLOSED:
        close()
    assert ("raydp_parallel" in sys.modules) == (kind != PLAIN)
    operations = {name: (make(), times) for name, (make, times) in OPERATIONS.items()}
    print(f"{ANSWER}ready", flush=True)
    for line in sys.stdin:
        print(f"{ANSWER}{median(*operations[line.strip()])}", flush=True)
    if close is not None:
        close()


if __name__ == "__main__":
    main(*sys.argv[1:])
