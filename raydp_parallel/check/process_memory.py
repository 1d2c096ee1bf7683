"""Memory of each process: of its GPU, or of the machine where there is none."""

from __future__ import annotations

import copy
import gc
import os
import re
import time
from pathlib import Path

import torch

from raydp_parallel.check import nets
from raydp_parallel.check.here import Here
from raydp_parallel.check.loads import LOADS, PERCEPTRON, RESNET, stepper
from raydp_parallel.check.table import Row, RowResult

_MB = 1e6
_WIDE = 8192
"""Width of a perceptron of which a layer has 268 MB."""

_TOLD = 1.1
"""Seconds after which a replica reports its GPU's memory again."""


def on_the_gpu(here: Here) -> RowResult:
    """One replica's peak and the driver's, compared with the plain module's and the size of the
    master.
    """
    load = LOADS[PERCEPTRON if here.quick else RESNET]
    x, y = (part.to(here.device) for part in load.batch())
    torch.manual_seed(0)
    made = load.make().to(here.device)
    master = sum(t.nbytes for t in made.state_dict().values())
    master += sum(p.nbytes for p in made.parameters())  # their gradients
    plain = _peak(here, stepper(load, copy.deepcopy(made), x, y))
    model = here.ours(made, here.one)
    step = stepper(load, model, x, y)
    driver = _peak(here, step)
    time.sleep(_TOLD)
    step()
    found = next(r for r in here.executor().stats().replicas if r.device_id == here.one[0])
    limit = 1.1 * plain + master
    numbers = {
        "plain_peak": plain,
        "driver_peak": driver,
        "driver_allocated": torch.cuda.memory_allocated(here.device),
        "replica_peak": found.memory_peak,
        "replica_allocated": found.memory,
        "master": master,
    }
    text = (
        f"peak MB: plain {plain / _MB:.0f}, driver {driver / _MB:.0f}, replica "
        f"{found.memory_peak / _MB:.0f}; driver and replica together at most "
        f"{limit / _MB:.0f} (1.1 x plain, and the master's weights, buffers and gradients)"
    )
    if here.quick:  # with so few activations the bytes in flight are the larger part
        return RowResult(f"{text.partition(';')[0]}; held against a limit without --quick", numbers)
    return RowResult(text, numbers, driver + found.memory_peak <= limit)


def _peak(here: Here, step: object) -> int:
    assert callable(step)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(here.device)
    torch.cuda.reset_peak_memory_stats(here.device)
    for _ in range(3):
        step()
    here.finish()
    own = torch.cuda.max_memory_allocated(here.device)
    return own - before


def does_not_grow(here: Here) -> RowResult:
    """Steps leave nothing behind: no models or graphs in the replicas, no memory on the GPU."""
    load = LOADS[PERCEPTRON]
    x, y = (part.to(here.device) for part in load.batch())
    step = stepper(load, here.ours(load.make(), here.several), x, y)
    for _ in range(10):  # until all memory that is recycled has been allocated
        step()
    here.executor().flush()
    before = torch.cuda.memory_allocated(here.device) if here.gpus else 0
    for _ in range(here.rounds(30)):
        step()
    held = here.executor().flush()
    grown = (torch.cuda.memory_allocated(here.device) if here.gpus else 0) - before
    graphs = sum(graphs for _, graphs in held)
    text = f"{graphs} graphs left in the replicas"
    text += f"; the driver's GPU memory grew by {grown / _MB:.1f} MB" if here.gpus else ""
    return RowResult(text, {"graphs": graphs, "grown": grown}, not graphs and grown <= x.nbytes)


def given_back(here: Here) -> RowResult:
    """What a replica used for a model is free for other processes once the model is gone."""
    x = torch.zeros(4, 8, device=here.device)
    here.ours(torch.nn.Linear(8, 3), here.one)(x)  # which starts the process
    before = _free(here)
    here.ours(nets.perceptron(_WIDE), here.one)(x).sum().backward()
    used = before - _free(here)
    gc.collect()  # the model
    here.executor().flush()
    kept = before - _free(here)
    text = f"MB: {used / _MB:.0f} in use for a model, {kept / _MB:.0f} after it"
    return RowResult(text, {"used": used, "kept": kept}, 4 * kept <= used)


def _free(here: Here) -> int:
    """Bytes of the GPU that are free, with those that this process keeps for later."""
    here.finish()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(here.device)[0]


def of_processes(here: Here) -> RowResult:
    """The memory of each process, as the system reports it."""
    here.ours(torch.nn.Linear(8, 3), here.several)(torch.zeros(4, 8, device=here.device))
    pids = {
        "driver": os.getpid(),
        **{f"replica {r.index}": r.pid for r in here.executor().replicas()},
    }
    found = {name: resident(pid) for name, pid in pids.items()}
    text = ", ".join(
        f"{name} {now / _MB:.0f} (peak {most / _MB:.0f})" for name, (now, most) in found.items()
    )
    return RowResult(f"MB: {text}", {name: list(sizes) for name, sizes in found.items()})


def resident(pid: int) -> tuple[int, int]:
    """Bytes of a process that are in memory, and the most that were; zeros if it is on another
    machine.
    """
    try:
        told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0, 0
    sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", told, re.MULTILINE))
    return 1024 * int(sizes.get("VmRSS", 0)), 1024 * int(sizes.get("VmHWM", 0))


ROWS = (
    Row("memory", "of the processes", of_processes),
    Row("memory", "nothing is left behind", does_not_grow),
    Row("memory", "of the GPU", on_the_gpu, gpus=1),
    Row("memory", "given back with a model", given_back, gpus=1),
)
