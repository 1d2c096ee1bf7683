"""How much memory does training take, over that of the weights?

`python -m benchmarks.memory` trains a net of 134 MB in two processes: by DDP over gloo, by an
optimizer in the driver, and by one whose steps the replicas make. Each way has a process of its
own, with a Ray of its own. It says what all processes of that way hold together after 30 steps and
after 300, without what they held when they had trained a tiny net. Pages that several share count
once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone, connect
from benchmarks.nets import CASES, DEEP_MLP, TINY_MLP
from benchmarks.peers import DDP, Ddp, Here, Peer, adamw, resident, resident_sgd, sgd

REPLICAS = 2
STEPS, MANY = 30, 300
GROWTH = 1.03
"""Of the memory from the first count of steps to the other one, with room for a buffer or two."""
_ANSWER = "memory: "
"""The beginning of an answer: Ray prints lines of its own."""


DRIVER, IN_REPLICAS = "in the driver", "in the replicas"
WAYS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    f"SGD, {DDP}": (sgd, 0.0),
    f"SGD {DRIVER}": (sgd, 7.0),
    f"SGD {IN_REPLICAS}": (resident_sgd, 8.0),
    f"AdamW, {DDP}": (adamw, 0.0),
    f"AdamW {IN_REPLICAS}": (resident, 12.0),
}
"""The optimizer of each way, and the most that is asked of it; 0 asks nothing."""


def held(pids: Iterable[int | None]) -> int:
    """Count the bytes that processes hold now."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def serve(way: str, stops: Sequence[int]) -> None:
    """Train a tiny net, then the large one; say how much more is held at each count of steps."""
    make = WAYS[way][0]
    if DDP in way:
        peer: Peer = Ddp(REPLICAS, make)
        pids = [child.pid for child in multiprocessing.active_children()]
    else:
        connect()
        executor = raydp_parallel.Executor(["cpu"] * REPLICAS)
        peer = Here(partial(raydp_parallel.DataParallel, executor=executor), make)
        pids = [os.getpid(), *(replica.pid for replica in executor.replicas())]
    peer.begin(TINY_MLP)
    peer.steps(STEPS)
    before = held(pids)
    peer.finish()
    peer.begin(DEEP_MLP)
    done, found = 0, []
    for stop in stops:
        peer.steps(stop - done)
        done = stop
        found.append(held(pids) - before)
    print(f"{_ANSWER}{json.dumps(found)}", flush=True)
    peer.close()


def run(effort: Effort) -> Report:
    """Memory of training over that of the weights."""
    stops = {"smoke": [1, 2], "quick": [STEPS, 2 * STEPS], "full": [STEPS, MANY]}[effort.value]
    weights = sum(p.nbytes for p in CASES[DEEP_MLP].make().parameters())
    rows, asked, data = [], [], {}
    for way, (_, limit) in WAYS.items():
        command = [sys.executable, "-m", "benchmarks.memory", way, *map(str, stops)]
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=paths)
        line = next(s for s in text.stdout.splitlines() if s.startswith(_ANSWER))
        first, last = [n / weights for n in json.loads(line.removeprefix(_ANSWER))]
        data[way] = first, last
        rows.append([way, first, last, last / first])
        if limit:
            asked.append(Asked(f"{way}: memory over the weights", first, limit))
            asked.append(Asked(f"{way}: growth to step {stops[-1]}", last / first, GROWTH))
    columns = ["", *(f"after {stop} steps" for stop in stops), "growth"]
    title = f"Memory over the weights' {weights / 1e6:.0f} MB, {REPLICAS} workers"
    question = "How much memory does training take, over that of the weights?"
    table = Table(title, columns, rows)
    return Report("memory", question, [table], asked, {"over_weights": data})


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in WAYS:
        serve(sys.argv[1], [*map(int, sys.argv[2:])])
    else:
        alone(run)
