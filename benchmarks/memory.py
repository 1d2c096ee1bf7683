"""Does a CPU replica hold a second copy of the weights?

`python -m benchmarks.memory` wraps a perceptron with 400 MB of weights and reads
`/proc/<pid>/smaps_rollup` of a replica and of the driver: before the replica knows the model, after
forwards, and after training steps. Private bytes are what the process alone holds. Pss counts a
shared page by its share, so the sum of Pss over both processes is what all this takes. While
forwards run that send all weights anew, the replica's private bytes are sampled, so that a copy
that lives only for a moment is seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone
from benchmarks.weights_sweep import perceptron

MEGABYTES = 400
LIMIT = 0.1
_TICK = 0.01


def memory(pid: int) -> dict[str, float]:
    """MB of a process: private, shared, and Pss."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) / 1024
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {
        "private": private,
        "shared": found["Shared_Clean"] + found["Shared_Dirty"],
        "pss": found["Pss"],
    }


def most_private(pid: int, work: Callable[[], None]) -> float:
    """The most private MB that a process had while some work was done."""
    seen = [memory(pid)["private"]]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_TICK):
            seen.append(memory(pid)["private"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(seen)


def change(net: nn.Module) -> None:
    """All weights, in place."""
    with torch.no_grad():
        torch._foreach_mul_([*net.parameters()], 1.0001)


def run(effort: Effort) -> Report:
    """Memory of a replica."""
    size = MEGABYTES if effort is not Effort.SMOKE else 4
    with raydp_parallel.Executor(["cpu"]) as executor:
        found = measure(executor, size)
    peak, before = found["peak"]["forwards"], found["before"]
    what = f"a replica's private memory, {size} MB of weights, most during forwards: to the weights"
    notes = [
        "Training adds one set of gradients to a replica and one to the driver.",
        f"The driver held the weights before: {before['driver']['private']:.0f} MB private then.",
    ]
    question = "Does a CPU replica hold a second copy of the weights?"
    data = {"megabytes": {"megabytes": size, **found}}
    return Report(
        "memory", question, [_table(found, size)], [Asked(what, peak / size, LIMIT)], data, notes
    )


def measure(executor: raydp_parallel.Executor, size: int) -> dict[str, Any]:
    """MB of both processes before and after, and the most that the replica had for itself over what
    it had before.
    """
    raydp_parallel.DataParallel(nn.Linear(4, 2), executor=executor)(torch.ones(1, 4))
    net = perceptron(size)
    change(net)
    model = raydp_parallel.DataParallel(net, executor=executor)
    x = torch.randn(1, net[0].in_features)  # type: ignore[index]
    (replica,) = executor.replicas()
    processes = {"replica": replica.pid, "driver": os.getpid()}

    def forwards() -> None:
        for _ in range(3):
            change(net)
            with torch.no_grad():
                model(x)

    def training() -> None:
        for _ in range(3):
            model(x).sum().backward()
            change(net)

    found: dict[str, Any] = {
        "before": {name: memory(pid) for name, pid in processes.items()},
        "peak": {},
    }
    for when, work in (("forwards", forwards), ("training steps", training)):
        found["peak"][when] = (
            most_private(replica.pid, work) - found["before"]["replica"]["private"]
        )
        found[when] = {name: memory(pid) for name, pid in processes.items()}
    return found


def _table(found: dict[str, Any], size: int) -> Table:
    rows: list[list[Any]] = []
    for when in ("forwards", "training steps"):
        for name, then in found["before"].items():
            grown = [found[when][name][kind] - then[kind] for kind in ("private", "shared", "pss")]
            rows.append([f"{name}, after {when}", *(round(mb) for mb in grown), grown[2] / size])
    for when, peak in found["peak"].items():
        rows.append([f"replica, most at any moment of {when}", round(peak), "", "", peak / size])
    columns = ["grown by", "private MB", "shared MB", "Pss MB", "to the weights"]
    return Table(f"memory, {size} MB of weights, one CPU replica", columns, rows)


if __name__ == "__main__":
    alone(run)
