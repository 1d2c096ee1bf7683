"""Processes that are forked from a driver leave alone what is their parent's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import printed
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, data_parallel, parallel_apply, replicate
from raydp_parallel.errors import ForkedProcess


def in_child(work: Callable[[], Any]) -> Any:
    """What a function returns, or raises, in a forked process that hangs for a minute at most."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(reads)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            try:
                found = work()
            except BaseException as error:
                found = error
            with open(writes, "wb") as pipe:
                pipe.write(pickle.dumps(found))
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}"
    return pickle.loads(said)


@pytest.fixture(scope="module")
def model(executors: Any) -> DataParallel[Any]:
    """A wrapper that has been called. No test leaves a trace in it: that is what they are about."""
    model = DataParallel(nn.Linear(300, 300), executor=executors())
    model(torch.ones(4, 300)).sum().backward()
    return model


def refused(work: Callable[[], Any]) -> None:
    """The child's error says what it is, and what to do."""
    found = in_child(work)
    assert isinstance(found, ForkedProcess), found
    assert "was forked" in str(found) and "spawn" in str(found) and "in the parent" in str(found)


@pytest.mark.long
def test_a_child_cannot_use_its_parent_s_replicas(model: DataParallel[Any]) -> None:
    """Whatever it tries, it is told at once; and the parent never notices."""
    x, executor = torch.ones(4, 300), model.executor
    (replica, _), out = replicate(model.module, ["cpu", "cpu"], executor=executor), model(x)
    pids = [info.pid for info in executor.replicas()]
    uses: list[Callable[[], Any]] = [
        lambda: model(x),
        lambda: DataParallel(nn.Linear(300, 2), ["cpu", "cpu"], executor=executor)(x),
        lambda: DataParallel(nn.Linear(300, 2), ["cpu", "cpu"])(x),
        lambda: data_parallel(nn.Linear(300, 2), x, ["cpu", "cpu"]),
        lambda: replica(x),
        lambda: parallel_apply([replica], [(x,)]),
        lambda: out.sum().backward(),
        lambda: torch.autograd.grad(out.sum(), [*model.parameters()], create_graph=True),
        lambda: replicate(model.module, ["cpu"], executor=executor),
        lambda: Executor(["cpu"]),
        lambda: Executor(),
        model.stats,
        executor.stats,
        executor.replicas,
        executor.grow,
        executor.flush,
    ]
    for use in uses:
        refused(use)
    out.sum().backward()
    assert torch.equal(model(x), out)
    assert [info.pid for info in executor.replicas()] == pids


@pytest.mark.parametrize("how", ["close", "shutdown"])
def test_the_end_of_a_child_ends_nothing_of_the_parent_s(
    model: DataParallel[Any], how: str
) -> None:
    """Whatever it closes."""
    executor = model.executor

    def end() -> None:
        if how == "shutdown":
            return raydp_parallel.shutdown()
        with executor:
            pass
        return executor.close()

    x = torch.ones(4, 300)
    expected, pids = model(x), [info.pid for info in executor.replicas()]
    kept = model(x)
    assert in_child(end) is None
    kept.sum().backward()
    assert torch.equal(model(x), expected)
    assert [info.pid for info in executor.replicas()] == pids


def test_a_child_may_use_the_module_itself(model: DataParallel[Any]) -> None:
    """It is plain torch; what the child changes stays there."""
    x = torch.ones(4, 300)
    before = model.module.weight.detach().clone()

    def train() -> Tensor:
        with torch.no_grad():
            out: Tensor = model.module(x)
            model.module.weight.zero_()
        return out

    expected = model(x).detach()
    torch.testing.assert_close(in_child(train), expected)
    assert torch.equal(model.module.weight, before)
    assert torch.equal(model(x), expected)


@pytest.mark.long
def test_workers_that_leave_the_model_alone(model: DataParallel[Any]) -> None:
    """A data loader forks, and so do pools: training goes on between what they bring."""
    data = [torch.full((300,), float(index)) for index in range(32)]
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2, multiprocessing_context="fork")
    pids = [info.pid for info in model.executor.replicas()]
    for batch in loader:
        model(batch).sum().backward()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    assert [info.pid for info in model.executor.replicas()] == pids


OWN = """
import os, sys, torch
from raydp_parallel import DataParallel
model = DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
child = os.fork()
if not child:
    out = model(torch.ones(4, 3))
    print("child", torch.allclose(out, model.module(torch.ones(4, 3))), flush=True)
    sys.exit(0)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print("parent", model(torch.ones(4, 3)).shape[0], flush=True)
child = os.fork()
if not child:
    sys.exit(3)
print("late", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.long
def test_a_child_of_a_process_that_has_no_replicas_yet() -> None:
    """As workers of a server: each starts its own. One that is forked later ends as it wants to."""
    said = printed("-c", OWN)
    lines = re.findall("^(?:child|status|parent|late) .*$", said, re.MULTILINE)
    assert lines == ["child True", "status 0", "parent 4", "late 3"], said
