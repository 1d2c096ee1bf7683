"""Fuzz: random calls leave the executor usable, and leak nothing; random programs compute what
upstream computes.

A program is its seed: `pytest "tests/contract/test_fuzz.py::test_random_programs[17]"` runs one,
`--long` all of them.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
from collections import Counter
from typing import Any

import oracle
import pytest
import random_programs
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, ReplicaError

pytestmark = pytest.mark.usefixtures("cluster")
OutOfMemory = torch.OutOfMemoryError
KINDS = ValueError, KeyError, IndexError, StopIteration, RuntimeError, OutOfMemory, SystemExit


class Strange(nn.Module):
    """Does what it is told with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, what: str, *args: Any, number: int = 0, **kwargs: Any) -> Any:
        self.calls += 1
        if what == "raise":
            raise KINDS[number]("as told")
        if what == "raise in backward":
            out = self._tensor(args, kwargs) * self.weight
            out.register_hook(lambda grad: 1 / 0)
            return out
        if what == "unsendable":
            return (i for i in range(3))
        if what == "lost":
            return None
        if what == "scalar":
            return self._tensor(args, kwargs).sum() * self.weight
        if what == "weighted":
            return [self._tensor(args, kwargs) * self.weight, {"more": args, **kwargs}]
        return args, kwargs

    def _tensor(self, *values: Any) -> Tensor:
        for value in values:
            for found in flat(value):
                dense = found.layout is torch.strided and found.dim()
                if dense and found.is_floating_point():
                    return found
        return torch.ones(1)


def value(draw: random.Random, rows: int, depth: int) -> Any:
    """Something that a program may pass to a module."""
    kind = draw.choice(
        ["tensor"] * 6 + ["leaf"] * 3 + ["list", "tuple", "dict"] * (2 if depth else 0)
    )
    if kind == "tensor":
        return tensor(draw, rows)
    if kind == "leaf":
        leaves = None, 3, 2.5, "text", b"bytes", float("nan"), {1, 2}, torch.float64, range(3)
        return draw.choice([*leaves, ValueError])
    parts = [value(draw, rows, depth - 1) for _ in range(draw.randrange(4))]
    if kind == "dict":
        return dict(zip(("a", 2, "c", None), parts, strict=False))
    return parts if kind == "list" else tuple(parts)


def tensor(draw: random.Random, rows: int) -> Tensor:
    """Of any shape and kind; now and then of a size that does not fit the others."""
    rows = draw.choice([rows] * 12 + [0, 1, rows + 1])
    shape = (rows, *(draw.randrange(4) for _ in range(draw.randrange(3))))
    dtypes = [torch.float32] * 6 + [torch.int64, torch.bool, torch.complex64]
    made = torch.ones(shape, dtype=draw.choice(dtypes))
    how = draw.randrange(12)
    if how == 0:
        return made.to_sparse() if made.dtype is torch.float32 else made
    if how == 1:
        return torch.tensor(1.5)
    if how == 2:
        return made.transpose(0, -1)
    return made.requires_grad_() if how < 8 and made.is_floating_point() else made


def call(draw: random.Random, model: Any, rows: int) -> str:
    """One call, right or wrong; says what came of it."""
    rare = "scalar", "lost", "raise", "raise in backward", "unsendable"
    whats = ["echo"] * 3 + ["weighted"] * 4 + [*rare]
    args = [value(draw, rows, 2) for _ in range(draw.randrange(3))]
    kwargs = {name: value(draw, rows, 2) for name in ("one", "two")[: draw.randrange(3)]}
    wrong = draw.randrange(30)
    if wrong == 0:
        args.append(threading.Lock())
    if wrong == 1:
        kwargs["number"] = "no number"
    try:
        with torch.set_grad_enabled(draw.random() < 0.8):
            kwargs = {"number": draw.randrange(len(KINDS)), **kwargs}
            out = model(draw.choice(whats), *args, **kwargs)
        found = [t for t in flat(out) if t.requires_grad and t.numel()]
        if found and draw.random() < 0.7:
            torch.autograd.backward([t.sum() for t in found], retain_graph=draw.random() < 0.2)
    except Exception as error:
        assert not isinstance(error, ReplicaError) or "SystemExit" in str(error), error
        return type(error).__name__
    return "fine"


def flat(out: Any) -> list[Tensor]:
    """The tensors in an output."""
    if isinstance(out, Tensor):
        return [out]
    inner = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return [t for part in inner for t in flat(part)]


def fuzz(executor: Executor, seed: int, calls: int) -> Counter[str]:
    """Many calls; what came of them."""
    draw, model = random.Random(seed), DataParallel(Strange(), executor=executor)
    results = Counter(call(draw, model, draw.choice([2, 3, 4])) for _ in range(calls))
    gc.collect()
    assert [graphs for _, graphs in executor.flush()] == [0] * len(executor.device_ids)
    x = torch.ones(4, 2, requires_grad=True)
    model.zero_grad()
    model("weighted", x)[0].sum().backward()
    assert model.module.weight.grad is not None and model.module.weight.grad.item() == 8
    return results


def files() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.long
@pytest.mark.parametrize("calls", [400, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore")
def test_random_calls(calls: int, executors: Any) -> None:
    """The same processes answer to the end; graphs, files and threads are as before."""
    executor = executors()
    fuzz(executor, 0, 200)
    pids = [info.pid for info in executor.replicas()]
    opened, threads = files(), threading.active_count()
    deaths = executor.stats().deaths
    results = fuzz(executor, 1, calls)
    assert [info.pid for info in executor.replicas()] == pids
    # Threads and files of Ray's and of earlier tests come and go; what a kind of call left
    # would be far more.
    assert files() <= opened + calls // 40
    assert threading.active_count() <= threads + calls // 40, threading.enumerate()
    assert executor.stats().deaths == deaths
    assert results["fine"] > calls // 5
    assert {"ValueError", "TransferError", "ZeroDivisionError", "ReplicaExit"} <= results.keys()


SHORT, ALL = 50, 300


@pytest.mark.parametrize(
    "seed", [*range(SHORT), *[pytest.param(n, marks=pytest.mark.long) for n in range(SHORT, ALL)]]
)
@pytest.mark.filterwarnings("ignore")
def test_random_programs(seed: int) -> None:
    """Losses, gradients and state are those under upstream's wrapper, after each of three steps."""
    found = random_programs.run(seed, lambda net, devices: DataParallel(net, ["cpu"] * devices))
    upstream = oracle.DataParallel
    expected = random_programs.run(seed, lambda net, devices: upstream(net, [*range(devices)]))
    rough, exact = {"rtol": 1e-3, "atol": 1e-4}, {"rtol": 1e-7, "atol": 1e-9}
    for (what, one), (_, other) in zip(found, expected, strict=False):
        close = rough if one.dtype is torch.float32 else exact
        told = functools.partial("program {}, {}: {}".format, seed, what)
        torch.testing.assert_close(one, other, **close, equal_nan=True, msg=told)
    assert [what for what, _ in found] == [what for what, _ in expected], f"program {seed}"
