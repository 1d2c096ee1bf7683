"""What do replicas cost the user's own operations, outside of calls?

`python -m benchmarks.own_process` times operations that have nothing to do with a wrapped module,
in processes of three kinds that take turns: without this package, with CPU replicas on the same
machine that have trained some steps and are idle, and with replicas that were closed again. The
operations are some that torch runs in several threads, and a step of a plain loop.

Where the memory of a process happens to lie makes up to a fifth, for all of its life: with 3
processes of a kind a run said 1.11 and 1.17 for a layer norm, and the next one 1.01 and 1.02. So
there are 9 of each kind. Each has its own median, and the medians of these are compared; a report
has them all, to be looked at. They come in groups, one process of each kind, which take turns on
the same machine at the same time, and the next group starts when this one has ended: otherwise
there would be the replicas of all. Which kind starts first changes from group to group.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import ray

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved
from benchmarks.own_operations import ANSWER, CLOSED, IDLE, OPERATIONS, PLAIN, STEPS, TIMES

LIMIT = 1.05
_GROUPS = 9
_KINDS = (PLAIN, IDLE, CLOSED)


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
    address = ray.get_runtime_context().gcs_address
    groups = _GROUPS if effort is not Effort.SMOKE else 1
    found: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in _KINDS} for name in OPERATIONS
    }
    for number in range(groups):
        first = number % len(_KINDS)
        for name, of_kinds in _group(address, [*_KINDS[first:], *_KINDS[:first]], effort).items():
            for kind, milliseconds in of_kinds.items():
                found[name][kind].append(milliseconds)
    medians = {
        name: {kind: statistics.median(processes) for kind, processes in of_kinds.items()}
        for name, of_kinds in found.items()
    }
    asked = [
        Asked(f"{name}, {kind}: to {PLAIN}", of_kinds[kind] / of_kinds[PLAIN], LIMIT)
        for name, of_kinds in medians.items()
        for kind in (IDLE, CLOSED)
    ]
    question = "What do replicas cost the user's own operations, outside of calls?"
    notes = [
        f"{groups} processes of each kind, each with its median, and the medians of these; "
        "a turn is the median of "
        f"{TIMES} runs, of the step {STEPS}."
    ]
    data = {"median_ms": medians, "median_ms_of_each_process": found}
    return Report("own_process", question, [_table(medians)], asked, data, notes)


def _group(address: str, kinds: list[str], effort: Effort) -> dict[str, dict[str, float]]:
    """Median milliseconds of each operation in one process of each kind, which take turns."""
    processes = {}
    for kind in kinds:
        processes[kind] = Process(kind, address)
        processes[kind].said()  # one after the other: all at once would import torch for long
    found = {}
    for name in OPERATIONS:
        turns = {kind: partial(process.time, name) for kind, process in processes.items()}
        found[name] = interleaved(turns, effort.rounds(40), effort.warmup)
    for process in processes.values():
        process.close()
    return found


def _table(medians: dict[str, dict[str, float]]) -> Table:
    rows: list[list[Any]] = []
    for name, found in medians.items():
        micros = [found[kind] * 1e3 for kind in _KINDS]
        rows.append([name, *micros, found[IDLE] / found[PLAIN], found[CLOSED] / found[PLAIN]])
    columns = ["", PLAIN, IDLE, CLOSED, "idle to without", "closed to without"]
    return Table("Microseconds of an operation, median", columns, rows)


if __name__ == "__main__":
    alone(run)
