"""What happens when a replica dies, or runs out of its GPU's memory."""

from __future__ import annotations

import copy
import os
import signal
import time

import torch
from torch import Tensor, nn

from raydp_parallel.check import nets
from raydp_parallel.check.here import Here, exact
from raydp_parallel.check.table import Row, RowResult

_START = 60.0
"""Seconds in which a new process must start."""


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
    back = _wait_for_successor(here, model, x, victim.pid)
    noticed, lost = after.deaths - before.deaths, after.lost_ms - before.lost_ms
    text = (
        f"{'the same bits' if same else 'DIFFERENT gradients'} after a kill before backward, in "
        f"{seconds * 1e3:.0f} ms ({lost:.0f} ms lost); a new process "
        f"{'is there' if back else 'did not come'}"
    )
    return RowResult(text, {"lost_ms": lost, "deaths": noticed}, same and back and noticed == 1)


def _wait_for_successor(here: Here, model: nn.Module, x: Tensor, pid: int) -> bool:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        with torch.no_grad():
            model(x)
        pids = [info.pid for info in here.executor().replicas() if info.state == "ready"]
        if pids and pid not in pids and len(pids) == len({*here.several}) + (here.gpus == 0):
            return True
        time.sleep(0.1)
    return False


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
)
