"""What happens when a replica dies, or runs out of its GPU's memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import signal
import time

import torch
from torch import Tensor, nn

from raydp_parallel.check import nets
from raydp_parallel.check.here import PLAIN, Here, exact
from raydp_parallel.check.table import Row, RowResult
from raydp_parallel.data_parallel import DataParallel

_START = 60.0
"""Seconds in which a new process must start."""

_CALLS = 300
"""Calls after which memory that is shared and not used has been freed."""


def _grads(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def killed(here: Here) -> RowResult:
    """The step in which a replica is killed gives the same bits; a new process joins later."""
    torch.manual_seed(0)
    net = nets.perceptron(256).to(here.device)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).to(here.device)
    calm, model = here.ours(copy.deepcopy(net), here.several), here.ours(net, here.several)
    with exact():
        calm(x).square().sum().backward()
        out = model(x)
        replicas = [info for info in here.executor().replicas() if info.state == "ready"]
        victim = replicas[-1]
        before = here.executor().stats()
        os.kill(victim.pid, signal.SIGKILL)
        begun = time.perf_counter()
        out.square().sum().backward()
        seconds = time.perf_counter() - begun
    after = here.executor().stats()
    same = torch.equal(_grads(model), _grads(calm))
    back = _wait_for_successor(model, x, victim.pid, len(replicas))
    noticed, lost = after.deaths - before.deaths, after.lost_ms - before.lost_ms
    text = (
        f"{'the same bits' if same else 'DIFFERENT gradients'} after a kill before backward, in "
        f"{seconds * 1e3:.0f} ms ({lost:.0f} ms lost); a new process "
        f"{'is there' if back else 'did not come'}"
    )
    return RowResult(text, {"lost_ms": lost, "deaths": noticed}, same and back and noticed == 1)


def _wait_for_successor(model: DataParallel[nn.Module], x: Tensor, pid: int, count: int) -> bool:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        with torch.no_grad():
            model(x)
        pids = [info.pid for info in model.executor.replicas() if info.state == "ready"]
        if pid not in pids and len(pids) == count:
            return True
        time.sleep(0.1)
    return False


def left_open(here: Here) -> RowResult:
    """Memory of the driver's GPU that a killed replica had open is the driver's again."""
    options = dataclasses.replace(PLAIN, gpu_paths=("ipc",))
    x, small = torch.zeros(16, 8, device=here.device), nn.Linear(8, 3).to(here.device)
    other = here.wrapped(small, here.one, options)
    other(x)
    before, replicas = torch.cuda.memory_allocated(here.device), other.executor.replicas()
    net = nets.perceptron(2048).to(here.device)
    size = sum(p.nbytes for p in net.parameters())
    here.wrapped(net, here.one, options)(x)
    os.kill(replicas[0].pid, signal.SIGKILL)
    back = _wait_for_successor(other, x, replicas[0].pid, len(replicas))
    del net
    gc.collect()
    for _ in range(_CALLS):
        other(x)
    grown = torch.cuda.memory_allocated(here.device) - before
    text = f"of {size / 1e6:.0f} MB of weights {grown / 1e6:.0f} are kept"
    text += "" if back else "; a new process did not come"
    return RowResult(text, {"kept": grown}, back and grown < size // 2)


def out_of_memory(here: Here) -> RowResult:
    """torch.OutOfMemoryError is raised in the driver; the process lives; the next call works."""
    free, total = torch.cuda.mem_get_info(here.device)
    model = here.ours(nets.Greedy(2 * total), here.several)
    x = torch.ones(2 * len(here.several), 4, device=here.device)
    bad = x.clone()
    bad[-2:] = -1  # the last chunk
    model(x)
    pids = [info.pid for info in here.executor().replicas()]
    try:
        model(bad)
    except torch.OutOfMemoryError as error:
        raised = str(error).strip().splitlines()[-1][:100]
    else:
        return RowResult("no torch.OutOfMemoryError was raised", {"free": free}, False)
    same = [info.pid for info in here.executor().replicas()] == pids
    fine = torch.equal(model(x), x)
    text = (
        f"raised: {raised}; the process {'lives' if same else 'was replaced'}, "
        f"the next call is {'right' if fine else 'WRONG'}"
    )
    return RowResult(text, {"free": free}, same and fine)


def spoiled(here: Here) -> RowResult:
    """A failed assertion in a kernel, after which the process cannot use its GPU any more: the
    error has its text, and one process is replaced.
    """
    model = here.ours(nets.Stray(), here.several)
    x = torch.ones(2 * len(here.several), 4, device=here.device)
    bad = x.clone()
    bad[-2:] = -1  # the last chunk
    model(x)
    before = here.executor().stats().deaths
    try:
        model(bad)
    except (RuntimeError, IndexError) as error:
        raised, told = str(error).strip().splitlines()[-1][:100], "assert" in str(error)
    else:
        return RowResult("no error was raised", {}, False)
    fine = torch.equal(model(x), x)
    deaths = here.executor().stats().deaths - before
    text = (
        f"raised{'' if told else ', WITHOUT the assertion'}: {raised}; the next call is "
        f"{'right' if fine else 'WRONG'}, {deaths} processes were replaced"
    )
    return RowResult(text, {"deaths": deaths}, fine and told and deaths <= 1)


ROWS = (
    Row("faults", "a replica is killed", killed),
    Row("faults", "a replica's GPU is spoiled", spoiled, gpus=1),
    Row("faults", "out of memory in one replica", out_of_memory, gpus=1),
    Row("faults", "memory that a killed replica had open", left_open, gpus=1),
)
