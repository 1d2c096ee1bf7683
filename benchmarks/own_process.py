"""What do replicas cost the user's own operations, outside of calls?

`python -m benchmarks.own_process` times operations that have nothing to do with a wrapped module,
in processes of three kinds that take turns: without this package, with CPU replicas on the same
machine that have trained some steps and are idle, and with replicas that were closed again. The
operations are some that torch runs in several threads, and a step of a plain loop. Of each kind
there are several processes: where their memory happens to lie makes up to a fifth.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import ray

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved
from benchmarks.own_operations import CLOSED, IDLE, OPERATIONS, PLAIN, STEPS, TIMES

LIMIT = 1.05
_EACH = 3


class Process:
    """A process that times operations when told.

    Args:
        kind: What it has of replicas.
        address: The Ray cluster for them.
    """

    def __init__(self, kind: str, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.own_operations", kind, address]
        pipe = subprocess.PIPE
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=paths
        )

    def said(self) -> str:
        """Its next line."""
        line: str = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with status {self._process.wait()}")
        return line

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
    address, each = (
        ray.get_runtime_context().gcs_address,
        _EACH if effort is not Effort.SMOKE else 1,
    )
    processes = {}
    for kind, i in itertools.product((PLAIN, IDLE, CLOSED), range(each)):
        processes[kind, i] = Process(kind, address)
        processes[kind, i].said()  # one after the other: all at once would import torch for long
    medians = {}
    for name in OPERATIONS:
        turns = {
            f"{kind} {i}": partial(process.time, name) for (kind, i), process in processes.items()
        }
        found = interleaved(turns, effort.rounds(40), effort.warmup)
        kinds = {
            kind: [found[f"{kind} {i}"] for i in range(each)] for kind in (PLAIN, IDLE, CLOSED)
        }
        medians[name] = {kind: statistics.median(each_of) for kind, each_of in kinds.items()}
    for process in processes.values():
        process.close()
    asked = [
        Asked(f"{name}, {kind}: to {PLAIN}", found[kind] / found[PLAIN], LIMIT)
        for name, found in medians.items()
        for kind in (IDLE, CLOSED)
    ]
    question = "What do replicas cost the user's own operations, outside of calls?"
    notes = [
        f"{each} processes of each kind; a turn is the median of {TIMES} runs, of the step {STEPS}."
    ]
    return Report("own_process", question, [_table(medians)], asked, {"median_ms": medians}, notes)


def _table(medians: dict[str, dict[str, float]]) -> Table:
    rows: list[list[Any]] = []
    for name, found in medians.items():
        micros = [found[kind] * 1e3 for kind in (PLAIN, IDLE, CLOSED)]
        rows.append([name, *micros, found[IDLE] / found[PLAIN], found[CLOSED] / found[PLAIN]])
    columns = ["", PLAIN, IDLE, CLOSED, "idle to without", "closed to without"]
    return Table("Microseconds of an operation, median", columns, rows)


if __name__ == "__main__":
    alone(run)
