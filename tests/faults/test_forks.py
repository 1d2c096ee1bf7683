"""Processes that are forked from a driver, or from a replica: they leave alone what is their
parent's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import (
    DataParallel,
    Executor,
    ForkedProcess,
    Options,
    data_parallel,
    parallel_apply,
    replicate,
)
from raydp_parallel.calls import executor as executors
from raydp_parallel.cluster import recorder
from raydp_parallel.state import versions
from raydp_parallel.transport.links import shared

on_cluster = pytest.mark.usefixtures("cluster")


def in_child(
    work: Callable[[], Any], limit: int = 60, parent: Callable[[], Any] = lambda: None
) -> Any:
    """What a function returns, or raises, in a forked process, which hangs for no longer than the
    limit.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(reads)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit)
            try:
                found = work()
            except BaseException as error:
                found = error
            with open(writes, "wb") as pipe:
                pipe.write(pickle.dumps(found))
        os._exit(0)
    os.close(writes)
    parent()
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


def test_a_child_s_child_cannot_either(model: DataParallel[Any]) -> None:
    """A pool in a worker, a daemon that forks twice."""
    x, out = torch.ones(4, 300), model(torch.ones(4, 300))
    pids = [info.pid for info in model.executor.replicas()]
    for use in (lambda: model(x), model.executor.stats, lambda: out.sum().backward()):
        found = in_child(lambda use=use: in_child(use))
        assert isinstance(found, ForkedProcess), found
    assert in_child(lambda: in_child(model.executor.close)) is None
    assert torch.equal(model(x), out)
    assert [info.pid for info in model.executor.replicas()] == pids


@pytest.mark.parametrize("how", ["close", "shutdown", "sys.exit", "collect"])
def test_the_end_of_a_child_ends_nothing_of_the_parent_s(
    model: DataParallel[Any], how: str
) -> None:
    """Neither what it closes, nor what its interpreter does at exit, nor what it drops."""
    executor = model.executor

    def end() -> None:
        if how == "close":
            with executor:
                pass
            executor.close()
        elif how == "shutdown":
            raydp_parallel.shutdown()
        elif how == "sys.exit":
            for hook in (
                raydp_parallel.monitoring.reporter._close_all,
                raydp_parallel.cluster.respawn._stop_all,
            ):
                hook()
        else:
            for slot in executor.replica_set.slots.values():
                line, client = slot.client.line, slot.client
                assert line.wire.socket.fileno() == -1 and client.process is None
                client.end()
                line.close()
                client.close()

    x = torch.ones(4, 300)
    expected, pids = model(x), [info.pid for info in executor.replicas()]
    kept = model(x)
    assert in_child(end) is None
    kept.sum().backward()
    assert torch.equal(model(x), expected)
    assert [info.pid for info in executor.replicas()] == pids


def test_locks_that_a_thread_held_at_the_fork(model: DataParallel[Any]) -> None:
    """The child has not got that thread, which will never let go of them."""
    executor, x = model.executor, torch.ones(4, 300)
    out = model(x)
    replica_set = executor.replica_set
    slot = next(iter(replica_set.slots.values()))
    held = [
        replica_set.lock,
        replica_set.recorder._lock,
        executors._shared.lock,
        slot.client.line._state,
        slot.client.line.wire._ending,
    ]
    held += [
        replica_set.backend._memory._arena._taking,
        slot.client.memory.ledger._lock,
        slot.client.memory.mappings._mapping,
        executor.groups._guard,
        executor.groups._making,
        versions._collectors._lock,
    ]
    if executor._reporter is not None:
        held.append(executor._reporter._guard)
    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in held:
                stack.enter_context(lock)
            ready.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(60)
    try:
        for use in (
            lambda: model(x),
            lambda: DataParallel(nn.Linear(300, 2), ["cpu", "cpu"])(x),
            lambda: out.sum().backward(),
            executor.stats,
        ):
            refused(use)
        assert in_child(lambda: recorder.Recorder("a child's own").name) == "a child's own"
        for lock in ("_guard", "_making"):
            assert not in_child(lambda lock=lock: getattr(executor.groups, lock).locked())
        assert in_child(executor.close) is None
        assert in_child(raydp_parallel.shutdown) is None
    finally:
        over.set()
        thread.join(60)
    model(x)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_map_that_runs_stays_the_parent_s(model: DataParallel[Any], ordered: bool) -> None:
    """A child can neither go on with it, nor end it."""
    batches = [torch.full((4, 300), float(number)) for number in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in batches]
    outputs = model.map(batches, ordered=ordered)
    found = [next(outputs)]
    refused(lambda: next(outputs))
    assert in_child(outputs.close) is None
    found += outputs
    assert len(found) == 8
    for number, out in enumerate(found):
        # A replica computes four rows here, and two in a forward: the last bits may differ.
        wanted = [expected[number]] if ordered else expected
        assert any(torch.allclose(out, one, atol=1e-4) for one in wanted)


def test_a_child_may_use_the_module_itself(model: DataParallel[Any]) -> None:
    """It is plain torch; what the child changes stays there."""
    x = torch.ones(4, 300)
    before = model.module.weight.detach().clone()

    def train() -> tuple[Tensor, Any]:
        with torch.no_grad():
            out = model.module(x)
            model.module.weight.zero_()
        return out, shared.expose(model.module.weight.untyped_storage(), 1 << 20)

    expected = model(x).detach()
    assert shared.expose(model.module.weight.untyped_storage(), 1 << 20) is not None
    found, shown = in_child(train)
    torch.testing.assert_close(found, expected)
    assert shown is None  # to replicas of the child's own, which would see the parent's
    assert torch.equal(model.module.weight, before)
    assert torch.equal(model(x), expected)


def test_a_child_sees_the_parent_s_later_changes(model: DataParallel[Any]) -> None:
    """Where weights lie in shared memory: a snapshot is to be cloned before the fork, as the
    documents say.
    """
    weight = model.module.weight
    assert weight.is_shared()
    before = weight.detach().clone()
    go_on = os.pipe()

    def look() -> tuple[Tensor, Tensor]:
        os.read(go_on[0], 1)
        return weight.detach().clone(), before

    def step() -> None:
        with torch.no_grad():
            weight.add_(1)
        os.write(go_on[1], b"x")

    seen, kept = in_child(look, parent=step)
    assert torch.equal(seen, weight) and torch.equal(kept, before) and not torch.equal(seen, before)
    with torch.no_grad():
        weight.copy_(before)
    for end in go_on:
        os.close(end)


@pytest.mark.long
def test_outputs_of_before_the_fork_are_the_child_s_own(executors: Any) -> None:
    """They lie in memory of the replicas: what the child writes stays there, and what they write
    next does, too.
    """
    executor = executors(1)
    model = DataParallel(nn.Flatten(0, -1), executor=executor)
    kept = [model(torch.full((1 << 20,), 3.0))]
    began, go_on = os.pipe(), os.pipe()

    def write() -> list[float]:
        os.write(began[1], b"x")
        os.read(go_on[0], 1)
        seen = kept[0].unique().tolist()
        return [*seen, *kept[0].fill_(5).unique().tolist()]

    def next_ones() -> None:
        os.read(began[0], 1)
        kept.clear()
        for number in range(3):
            model(torch.full((1 << 20,), float(number)))
        os.write(go_on[1], b"x")

    assert in_child(write, parent=next_ones) == [3, 5]
    for end in (*began, *go_on):
        os.close(end)


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Rows that workers make; the first of each worker waits until the other has begun, so that
    there are two.
    """

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((300,), float(index))


@pytest.mark.long
def test_workers_that_leave_the_model_alone(model: DataParallel[Any]) -> None:
    """A data loader forks, and so do pools: training goes on between what they bring."""
    loader = torch.utils.data.DataLoader(
        Numbers(), 4, num_workers=2, multiprocessing_context="fork"
    )
    pids = [info.pid for info in model.executor.replicas()]
    for batch in loader:
        model(batch).sum().backward()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    assert [info.pid for info in model.executor.replicas()] == pids


def test_replicas_in_the_process_itself_are_forked_with_it() -> None:
    """There is nothing to share: the child has its own."""
    with Executor(["cpu", "cpu"], options=Options(in_process=True)) as executor:
        model = DataParallel(nn.Linear(3, 2), executor=executor)
        x = torch.ones(4, 3)
        expected = model(x).detach()
        assert torch.equal(in_child(lambda: model(x).detach()), expected)


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
"""


@pytest.mark.long
def test_a_child_of_a_process_that_has_no_replicas_yet() -> None:
    """As of a server that loads its program before it forks workers: each starts its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", OWN], capture_output=True, text=True, timeout=300, env=environment
    )
    assert [
        line
        for line in done.stdout.splitlines()
        if line.split()[0] in ("child", "status", "parent")
    ] == [
        "child True",
        "status 0",
        "parent 4",
    ], done.stderr


GARBAGE = """
import gc, os, torch
from raydp_parallel import DataParallel, Executor
from raydp_parallel.cluster import ray_api
import ray

model = DataParallel(torch.nn.Linear(3, 2), ["cpu"])
expected = model(torch.ones(4, 3))


@ray.remote(num_cpus=0)
class Other:
    pass


gc.disable()
dead = Other.remote()
ray.kill(dead)
for unused in ([dead], [ray.put(bytes(1 << 20))]):
    unused.append(unused)
del dead, unused
child = os.fork()
if not child:
    os._exit(0 if gc.collect() else 1)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
for _ in range(3):
    ray_api.nodes()
    with Executor(["cpu"]) as executor:
        DataParallel(torch.nn.Linear(3, 2), executor=executor)(torch.ones(4, 3))
print("parent", torch.equal(model(torch.ones(4, 3)), expected), flush=True)
"""


@pytest.mark.long
def test_a_child_that_collects_the_parent_s_garbage() -> None:
    """Ray reports each actor handle that goes out of use: from a child that would be a message in
    the middle of the parent's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.stdout.splitlines() == ["status 0", "parent True"], done.stderr


class Forks(nn.Module):
    """Forks in its forward, or in a hook of its backward; the child ends in one way or another,
    none of which is an answer.
    """

    def __init__(self, how: str, folder: Path, backward: bool) -> None:
        super().__init__()
        self.how = how
        self.folder = folder
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if not self.backward:
            return x + self.fork()
        y = x * 1
        y.register_hook(lambda grad: grad * self.fork())
        return y

    def fork(self) -> int:
        """1, once the child has ended."""
        child = os.fork()
        if not child:
            if self.how == "exit":
                sys.exit(3)
            if self.how == "raise":
                raise ValueError(f"the child's {4000 + 321}")
            return -1
        (self.folder / str(child)).write_text(
            str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        )
        return 1


@pytest.fixture(scope="module", params=[True, False], ids=["line", "tasks"])
def alone(executors: Any, request: pytest.FixtureRequest) -> Executor:
    """Replicas that are called over their lines or by Ray's tasks; tests use the first."""
    return executors(direct_line=request.param)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("how", "status"), [("exit", "3"), ("raise", "1"), ("return", "0")])
def test_a_child_of_a_replica_answers_nothing(
    how: str, status: str, backward: bool, alone: Executor, tmp_path: Path
) -> None:
    """It ends where its process would have answered; the replica waits for it, and answers what is
    right.
    """
    model = DataParallel(Forks(how, tmp_path, backward), ["cpu"], executor=alone)
    x = torch.arange(3.0, requires_grad=True)
    for _ in range(2):
        out = model(x)
        assert out.tolist() == ([0, 1, 2] if backward else [1, 2, 3])
        if backward:
            assert torch.autograd.grad(out.sum(), x)[0].tolist() == [1, 1, 1]
    assert [path.read_text() for path in tmp_path.iterdir()] == [status] * 2
    assert alone.stats().deaths == 0


def test_what_a_child_raises_does_not_stand_in_the_replica_s_log(
    alone: Executor, tmp_path: Path
) -> None:
    """Its text may hold data. That there was an error, and where, does."""
    DataParallel(Forks("raise", tmp_path, False), ["cpu"], executor=alone)(torch.ones(3))
    info, _ = alone.replicas()
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    (file,) = logs.glob(f"worker-*-{info.pid}.err")
    log = file.read_text()
    assert "a forked process ended by ValueError" in log and "in fork" in log
    assert "4321" not in log


class ReturnsTwice(nn.Module):
    """Forks in its forward, or in a hook of its backward. The child goes on when it is told to."""

    def __init__(self, folder: Path, backward: bool) -> None:
        super().__init__()
        self.folder = folder
        self.backward = backward
        self.forks = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.backward:
            return x + self.fork()
        y = x * 1
        y.register_hook(lambda grad: grad * self.fork())
        return y

    def fork(self) -> int:
        """1 in the process itself, and later -1 in the child."""
        if not self.forks:
            return 1
        child = os.fork()
        if child:
            (self.folder / "child").write_text(str(child))
            return 1
        (self.folder / "told").read_bytes()
        return -1


@pytest.mark.parametrize("backward", [False, True])
def test_a_child_that_returns_writes_into_no_answer(
    backward: bool, alone: Executor, tmp_path: Path
) -> None:
    """Its memory for answers is the replica's, which has been used before, and where the
    replica's answer lies already.
    """
    os.mkfifo(tmp_path / "told")
    net = ReturnsTwice(tmp_path, backward)
    model = DataParallel(net, ["cpu"], executor=alone)
    x = torch.ones(1 << 20, requires_grad=True)

    def call() -> Tensor:
        out = model(x)
        return torch.autograd.grad(out.sum(), x)[0] if backward else out.detach()

    for _ in range(3):
        call()
    net.forks = True
    found = call()
    expected = found.clone()
    child = os.pidfd_open(int((tmp_path / "child").read_text()))
    (tmp_path / "told").write_bytes(b"")
    waiting = select.poll()
    waiting.register(child, select.POLLIN)
    assert waiting.poll(60_000)
    os.close(child)
    assert torch.equal(found, expected) and {*expected.tolist()} == {1.0 if backward else 2.0}
    assert alone.stats().deaths == 0
