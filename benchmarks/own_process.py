"""How much do replicas slow the user's own operations, outside of calls?

`python -m benchmarks.own_process` times operations that have nothing to do with a wrapped module,
in processes of three kinds that take turns: without this package, with CPU replicas that have
trained some steps and are idle, and with replicas that were closed again.

Where the memory of a process happens to lie makes up to a fifth, for all of its life. So there are
9 groups of processes, one of each kind, one group after the other; each process has its median, and
the medians of these are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved, timed
from benchmarks.nets import perceptron, vectors

LIMIT = 1.05
PLAIN, IDLE, CLOSED = "without the package", "idle replicas", "after close()"
ANSWER = "answer: "
"""The beginning of an answer: Ray prints lines of its own."""
TIMES, STEPS = 100, 5
_GROUPS = 9
_KINDS = (PLAIN, IDLE, CLOSED)


def mlp_step() -> Callable[[], object]:
    """A step of a plain loop, with Adam."""
    net, (x, y) = perceptron(256), vectors(256, 64)
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


OPERATIONS: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    "add of 40,000": (lambda: partial(torch.add, torch.ones(40_000), 1), TIMES),
    "softmax 64 x 1000": (lambda: partial(torch.softmax, torch.randn(64, 1000), 1), TIMES),
    "layer norm 128 x 512": (lambda: partial(F.layer_norm, torch.randn(128, 512), (512,)), TIMES),
    "MLP step with Adam": (mlp_step, STEPS),
}
"""A function that makes each operation, and how often it runs in a turn."""


class Process:
    """A process that times operations when told.

    Args:
        kind: Its share of replicas.
        address: The Ray cluster for them.
    """

    def __init__(self, kind: str, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.own_process", kind, address]
        pipe = subprocess.PIPE
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=paths
        )

    def said(self) -> str:
        """Its next answer; Ray prints warnings of its own between."""
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return str(line.removeprefix(ANSWER))
        raise RuntimeError(f"a process ended with status {self._process.wait()}")

    def time(self, operation: str) -> float:
        """The seconds of an operation."""
        self._process.stdin.write(f"{operation}\n")
        self._process.stdin.flush()
        return float(self.said())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def run(effort: Effort) -> Report:
    """Own operations beside idle and closed replicas."""
    import ray

    address = ray.get_runtime_context().gcs_address
    groups = _GROUPS if effort is not Effort.SMOKE else 1
    found: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in _KINDS} for name in OPERATIONS
    }
    for number in range(groups):
        first = number % len(_KINDS)
        processes = {}
        for kind in (*_KINDS[first:], *_KINDS[:first]):
            processes[kind] = Process(kind, address)
            processes[kind].said()  # one after the other: all at once would import torch for long
        for name in OPERATIONS:
            turns = {kind: partial(process.time, name) for kind, process in processes.items()}
            for kind, ms in interleaved(turns, effort.rounds(40), effort.warmup).items():
                found[name][kind].append(ms)
        for process in processes.values():
            process.close()
    medians = {
        name: {kind: statistics.median(processes) for kind, processes in of_kinds.items()}
        for name, of_kinds in found.items()
    }
    asked = [
        Asked(f"{name}, {kind}: to {PLAIN}", of_kinds[kind] / of_kinds[PLAIN], LIMIT)
        for name, of_kinds in medians.items()
        for kind in (IDLE, CLOSED)
    ]
    question = "How much do replicas slow the user's own operations, outside of calls?"
    notes = [f"{groups} processes of each kind, each with its median, and the medians of these."]
    data = {"median_ms": medians, "median_ms_of_each_process": found}
    return Report("own_process", question, [_table(medians)], asked, data, notes)


def _table(medians: dict[str, dict[str, float]]) -> Table:
    rows: list[list[Any]] = []
    for name, found in medians.items():
        micros = [found[kind] * 1e3 for kind in _KINDS]
        rows.append([name, *micros, found[IDLE] / found[PLAIN], found[CLOSED] / found[PLAIN]])
    columns = ["", PLAIN, IDLE, CLOSED, "idle to without", "closed to without"]
    return Table("Microseconds of an operation, median", columns, rows)


def serve(kind: str, address: str) -> None:
    """For the name of an operation in each line that comes, say its seconds."""
    if kind != PLAIN:
        import ray

        import raydp_parallel

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        executor = raydp_parallel.Executor(["cpu", "cpu"])
        model = raydp_parallel.DataParallel(perceptron(256), executor=executor)
        x, y = vectors(256, 64)
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
        if kind == CLOSED:
            executor.close()
    operations = {name: (make(), times) for name, (make, times) in OPERATIONS.items()}
    print(f"{ANSWER}ready", flush=True)
    for line in sys.stdin:
        work, times = operations[line.strip()]
        print(f"{ANSWER}{statistics.median(timed(work) for _ in range(times))}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _KINDS:
        serve(*sys.argv[1:])
    else:
        alone(run)
