"""The executor: one actor per device for all wrappers, what they may be, and how long what they
hold lives.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import oracle
import pytest
import ray
import torch
from harness import assert_same_grads, assert_same_state
from torch import nn

import raydp_parallel
from raydp_parallel import (
    DataParallel,
    Executor,
    ExecutorClosed,
    Options,
    PlacementError,
    ReplicaInfo,
    data_parallel,
    devices,
    replicate,
)
from raydp_parallel.calls.executor import shared
from raydp_parallel.cluster.ray_backend import CoreShares
from raydp_parallel.devices import process
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.state import module_sources

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]
ROOT = Path(__file__).parents[3]

on_cluster = pytest.mark.usefixtures("cluster")


class Pids(nn.Module):
    """Says in which process each row was seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x),), os.getpid())


class Nested(nn.Module):
    """A module that wraps a part of itself."""

    def __init__(self, ids: Sequence[Any], wrapper: Any = DataParallel) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.block = wrapper(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), list(ids))
        self.after = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.block(self.before(x)).tanh())


class InnerPids(nn.Module):
    """Says where it runs, and where a wrapper inside it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DataParallel(Pids(), THREE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full((len(x),), os.getpid()), self.inner(x)], 1)


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


# --- an executor of one's own ---


@on_cluster
def test_replicas_are_described(two: Executor) -> None:
    """One frozen entry per device: index, device, node, process and state."""
    found = two.replicas()
    assert [type(info) for info in found] == [ReplicaInfo, ReplicaInfo]
    assert [(i.index, i.device, i.device_id, i.state, i.gpu) for i in found] == [
        (0, "cpu", "cpu", "ready", ""),
        (1, "cpu", "cpu", "ready", ""),
    ]
    assert {i.node_id for i in found} == {ray.get_runtime_context().get_node_id()}
    assert len({i.pid for i in found} | {os.getpid(), 0}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].pid = 3  # type: ignore[misc]


@pytest.mark.long
@on_cluster
def test_a_wrapper_uses_the_executor_that_it_is_given(two: Executor) -> None:
    """Its devices are the default, and its processes run the chunks."""
    model = DataParallel(Pids(), executor=two)
    assert model.executor is two
    assert model.device_ids == TWO == two.device_ids
    assert model(batch(4)).tolist() == [i.pid for i in two.replicas() for _ in range(2)]
    one = DataParallel(Pids(), ["cpu"], executor=two)
    assert one(batch(2)).tolist() == [two.replicas()[0].pid] * 2


@pytest.mark.long
@on_cluster
def test_an_executor_starts_what_a_wrapper_needs_besides() -> None:
    """A wrapper may name more devices than its executor was made for; those that run go on."""
    with Executor(["cpu"]) as executor:
        before = executor.replicas()
        assert len(set(DataParallel(Pids(), TWO, executor=executor)(batch(2)).tolist())) == 2
        assert executor.replicas()[:1] == before
        assert len(executor.replicas()) == 2


@pytest.mark.long
@on_cluster
def test_an_executor_without_devices_starts_nothing() -> None:
    """With ``()`` replicas start with the first forward; a wrapper's devices are the cluster's
    then.
    """
    with Executor(()) as executor:
        assert executor.replicas() == ()
        assert executor.stats().forwards == 0
        assert DataParallel(linear(), executor=executor).device_ids == [0, 1]
        model = DataParallel(Pids(), ["cpu"], executor=executor)
        assert executor.replicas() == ()
        model(batch())
        assert [info.device_id for info in executor.replicas()] == ["cpu"]


class Closed(NamedTuple):
    """What is left of an executor that was used and closed.

    Attributes:
        executor: It.
        model: Its wrapper.
        out: The output of a forward.
        pids: The processes of its replicas.
        others: The processes of the executor that wrappers without one share, at that time.
        again: What a wrapper of the same module gave with those.
        clients: The driver's side of its replicas.
    """

    executor: Executor
    model: DataParallel[Any]
    out: torch.Tensor
    pids: list[int]
    others: list[int]
    again: torch.Tensor
    clients: list[Any]


@pytest.fixture(scope="module")
def closed(cluster: None) -> Closed:
    """An executor that is closed, for all tests of that."""
    with Executor(TWO) as executor:
        model = DataParallel(linear(), executor=executor)
        out = model(batch())
        pids = [info.pid for info in executor.replicas()]
        process_wide = DataParallel(model.module, TWO)
        again = process_wide(batch())
        others = [info.pid for info in process_wide.executor.replicas()]
        clients = [slot.client for slot in executor.replica_set.slots.values()]
    return Closed(executor, model, out, pids, others, again, clients)


@pytest.mark.long
@on_cluster
def test_close_ends_the_processes(closed: Closed) -> None:
    """After the with block replicas are closed and refused, their processes end, and others
    go on.
    """
    other = DataParallel(linear(), TWO)
    executor = closed.executor
    assert [i.state for i in executor.replicas()] == ["closed"] * 2
    executor.close()
    for use in (
        lambda: closed.model(batch()),
        executor.flush,
        lambda: DataParallel(linear(), executor=executor)(batch()),
    ):
        with pytest.raises(ExecutorClosed, match="closed"):
            use()
    assert all(_ended(pid) for pid in closed.pids)
    assert other(batch()).shape == (6, 2)


@on_cluster
def test_ray_does_not_take_the_end_for_an_accident(closed: Closed) -> None:
    """Of one it would tell the user, in red, with advice about memory."""
    for client in closed.clients:
        with pytest.raises(ray.exceptions.ActorDiedError, match=r"was killed by `ray\.kill`"):
            ray.get(client.actor.hello.remote(), timeout=30)


@on_cluster
def test_executors_do_not_share_replicas(closed: Closed) -> None:
    """An executor of one's own has processes of its own, also for the same module."""
    assert torch.equal(closed.out, closed.again)
    assert not {*closed.pids} & {*closed.others} and len(closed.others) >= 2


@on_cluster
def test_backward_after_close_says_so(closed: Closed) -> None:
    """The graphs went with the replicas."""
    with pytest.raises(ExecutorClosed):
        closed.out.sum().backward()


@pytest.mark.long
@on_cluster
def test_who_is_stopped_is_ended_all_the_same() -> None:
    """Ray cannot reach it."""
    with Executor(["cpu"]) as executor:
        (info,) = executor.replicas()
        os.kill(info.pid, signal.SIGSTOP)
    assert _ended(info.pid)


def _ended(pid: int) -> bool:
    """Waits for a process to end."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.005)
    return False


@on_cluster
def test_stats_count(two: Executor) -> None:
    """Forwards, trips back, rows and bytes, of all and of each replica; frozen, as a dict, and as a
    table.
    """
    before = two.stats()
    model = DataParallel(linear(), executor=two)
    for _ in range(2):
        model(batch(5)).sum().backward()
    after = two.stats()
    assert after.forwards - before.forwards == after.backwards - before.backwards == 2
    assert after.state_sends - before.state_sends == 2
    assert after.state_bytes - before.state_bytes == 2 * (4 * 2 + 2) * 4
    assert after.reruns == before.reruns
    grown = [
        (b.calls - a.calls, b.rows - a.rows, b.deaths - a.deaths)
        for a, b in zip(before.replicas, after.replicas, strict=True)
    ]
    assert grown[:2] == [(2, 6, 0), (2, 4, 0)]
    for a, b in zip(before.replicas[:2], after.replicas[:2], strict=True):
        assert b.bytes_in > a.bytes_in and b.bytes_out > a.bytes_out
        assert b.forward_seconds > a.forward_seconds and b.backward_seconds > a.backward_seconds
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.forwards = 0  # type: ignore[misc]
    assert json.loads(json.dumps(after.to_dict()))["replicas"][0]["pid"] == after.replicas[0].pid
    lines = str(after).splitlines()
    assert lines[0].split()[:4] == ["replica", "device", "node", "pid"]
    assert len(lines) == len(after.replicas) + 2
    assert str(after.replicas[1].pid) in lines[2] and after.link in lines[-1]


@on_cluster
def test_an_executor_in_a_pickle_or_a_copy(two: Executor) -> None:
    """A copy of a wrapper keeps the executor; out of a pickle comes the process's, for replicas do
    not travel.
    """
    model = DataParallel(linear(), executor=two)
    out = model(batch())
    copied = copy.deepcopy(model)
    assert copied.executor is two and torch.equal(copied(batch()), out)
    again = pickle.loads(pickle.dumps(model))
    assert again.executor is shared(Options()) and torch.equal(again(batch()), out)


def test_in_process_replicas() -> None:
    """``Options(in_process=True)`` runs the same code in this process."""
    model = DataParallel(Pids(), TWO, options=Options(in_process=True))
    assert model(batch(2)).tolist() == [os.getpid()] * 2
    assert [i.pid for i in model.executor.replicas()] == [os.getpid()] * 2


# --- the process's executor ---


@on_cluster
def test_one_actor_per_device_for_all_wrappers() -> None:
    """Any number of wrappers of any module uses the same processes, the n-th "cpu" always
    the same.
    """
    pids = DataParallel(Pids(), THREE)(batch(3)).tolist()
    assert len(set(pids)) == 3
    assert DataParallel(Pids(), THREE)(batch(3)).tolist() == pids
    assert DataParallel(nn.Sequential(Pids()), TWO, dim=0)(batch(2)).tolist() == pids[:2]
    assert DataParallel(Pids(), ["cpu"])(batch(2)).tolist() == pids[:1] * 2
    assert data_parallel(Pids(), batch(2), TWO).tolist() == pids[:2]


@on_cluster
def test_wrappers_options_do_not_start_more_replicas() -> None:
    """How gradients and scalars come out is the wrapper's matter; what concerns processes makes
    another executor.
    """
    plain = DataParallel(linear(), TWO).executor
    assert (
        DataParallel(linear(), TWO, options=Options(unused_grads="none", scalars="mean")).executor
        is plain
    )
    assert DataParallel(linear(), TWO, options=Options(threads=2)).executor is not plain


@pytest.mark.long
@on_cluster
def test_only_who_waits_for_replicas_of_this_node_ends_helpers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its calls, and never outside of them."""
    rests: list[int] = []
    monkeypatch.setattr(devices, "rest", lambda: rests.append(threading.get_ident()))
    with Executor(TWO) as executor:
        model = DataParallel(linear(), executor=executor)
        assert rests == []
        model(batch()).sum().backward()
        backend, here = executor.replica_set.backend, ray.get_runtime_context().get_node_id()
        near = here in [
            slot.hello.node
            for slot in executor.replica_set.slots.values()
            if slot.hello is not None
        ]
        assert set(rests) == ({threading.get_ident()} if near else set())
    rests.clear()
    backend.rest()
    DataParallel(linear(), TWO, options=Options(in_process=True))(batch())
    assert rests == []


class Threads(nn.Module):
    """Says with how many threads each row was computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x),), torch.get_num_threads()) + 0 * x[:, 0]


@pytest.mark.long
@on_cluster
def test_replicas_share_the_cores_that_there_are(pytestconfig: pytest.Config) -> None:
    """Not those that Ray was told of, which are four on one node, if those are more; in forward and
    in backward.
    """
    told = 4 if not pytestconfig.getoption("--nodes") else 1
    each = max(1, min(told, len(os.sched_getaffinity(0))) // 2)
    with Executor(TWO, options=Options(threads=None)) as executor:
        assert {slot.hello.cores for slot in executor.replica_set.slots.values() if slot.hello} == {
            process.cores()
        }
        assert DataParallel(Threads(), executor=executor)(batch()).tolist() == [each] * 6


@pytest.mark.parametrize(
    ("nodes", "machines", "told", "found", "expected"),
    [
        (1, 1, 4, [2, 2], [2, 1, 1]),
        (1, 1, 4, [8, 8], [4, 2, 1]),
        (2, 2, 4, [2, 2], [2, 2, 1]),
        (2, 1, 4, [2, 2], [2, 1, 1]),
        (1, 1, 16, [8, 6], [6, 3, 2]),
        (1, 1, 4, [0], [4, 2, 1]),
    ],
)
def test_threads_are_a_function_of_the_call(
    nodes: int, machines: int, told: int, found: list[int], expected: list[int]
) -> None:
    """Of how many chunks it has, and of what was there at first: a replica that runs a chunk again computes
    the same bits.
    """
    computing: list[Any] = [
        SimpleNamespace(address=min(number, machines - 1), total={"CPU": told})
        for number in range(nodes)
    ]
    cores = CoreShares(None, computing)
    cores.count(
        [
            ReplicaHello(1, "n", "cuda:0", "", "", 0, 0),
            *(ReplicaHello(1, "n", "cpu", "", "", 0, 0, "", n) for n in found),
        ]
    )
    assert [cores.threads(chunks) for chunks in (1, 2, 3)] == expected
    cores.count([ReplicaHello(2, "later", "cpu", "", "", 0, 0, "", 1)])
    assert [cores.threads(chunks) for chunks in (1, 2, 3)] == (
        expected if found != [0] else [1, 1, 1]
    )
    assert CoreShares(5, computing).threads(2) == 5


@on_cluster
def test_gan_pair() -> None:
    """Two wrapped nets that train against each other, with a gradient penalty, as under
    upstream.
    """

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def train(wrap: Any) -> tuple[nn.Module, nn.Module]:
        make, judge = (wrap(net) for net in nets())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (make, judge)]
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            noise, real = torch.randn(6, 3, generator=draw), torch.randn(6, 2, generator=draw)
            fake = make(noise)
            mixed = ((real + fake.detach()) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            optimizers[1].zero_grad()
            (judge(fake.detach()).mean() - judge(real).mean() + penalty).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-judge(make(noise)).mean()).backward()
            optimizers[0].step()
        return make, judge

    for ours, theirs in zip(
        train(lambda net: DataParallel(net, TWO)),
        train(lambda net: oracle.DataParallel(net, [0, 1])),
        strict=True,
    ):
        assert_same_state(ours, theirs, rtol=1e-6, atol=1e-7)


@on_cluster
def test_wrapped_block_inside_a_bigger_model() -> None:
    """Gradients flow through the driver's part on both sides, as under upstream."""
    ours, theirs = Nested(TWO), Nested([0, 1], oracle.DataParallel)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(2):
        for model in (ours, theirs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            model(batch()).square().sum().backward()
            optimizer.step()
    assert_same_grads(ours, theirs)
    assert_same_state(ours, theirs)


@on_cluster
def test_a_wrapper_inside_a_wrapped_module_runs_in_place() -> None:
    """In a replica the inner wrapper calls its module there, and the results are the plain
    module's.
    """
    for outer, inner in DataParallel(InnerPids(), TWO)(batch(4)).tolist():
        assert outer == inner != os.getpid()
    net = Nested(THREE)
    plain = Nested(THREE, lambda module, ids: nn.ModuleDict({"module": module}))
    plain.load_state_dict(net.state_dict())
    model = DataParallel(net, TWO)
    x = batch()
    out = model(x)
    out.square().sum().backward()
    expected = plain.after(plain.block["module"](plain.before(x)).tanh())
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    assert_same_grads(net, plain)


@on_cluster
def test_rewrapping_sends_nothing() -> None:
    """A new wrapper each epoch over the same module: what the replicas hold stays theirs."""
    net = linear()
    model = DataParallel(net, TWO)
    model(batch())
    before = model.executor.stats().state_sends
    for _ in range(3):
        model = DataParallel(net, TWO)
        model(batch())
    assert model.executor.stats().state_sends == before
    other = DataParallel(net, THREE[:2], dim=-2)  # while the first is still there
    del model
    other(batch())
    assert other.executor.stats().state_sends == before


@on_cluster
def test_replicas_of_one_module_in_several_threads() -> None:
    """Each thread's forward is of the module as it is, also when all of them find it changed at
    once.
    """
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 4, generator=draw) for _ in TWO]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for step in range(60):
            outputs: list[Any] = [None] * len(inputs)

            def work(i: int, replica: Any, outputs: list[Any] = outputs) -> None:
                outputs[i] = replica(inputs[i])

            threads = [
                threading.Thread(target=work, args=each) for each in enumerate(replicate(net, TWO))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.testing.assert_close(outputs, [net(x) for x in inputs])
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
            if step % 3 == 0:
                net[1] = nn.ReLU() if step % 2 else nn.Tanh()
    finally:
        sys.setswitchinterval(interval)


# --- how long things live ---


def holdings(executor: Executor) -> list[tuple[int, int]]:
    """How many models and graphs the first two CPU replicas hold, whatever came before them in the
    executor.
    """
    ready = [replica for replica in executor.replicas() if replica.state == "ready"]
    found = zip(ready, executor.flush(), strict=True)
    return [held for replica, held in found if replica.device_id == "cpu"][:2]


@on_cluster
def test_dropping_a_wrapper_frees_its_replicas() -> None:
    """With the last wrapper of a module its copies go, without the garbage collector; the actors
    stay.
    """
    executor = DataParallel(linear(), TWO).executor
    pids = DataParallel(Pids(), TWO)(batch(2)).tolist()
    gc.collect()
    gc.disable()
    try:
        before = holdings(executor)
        model = DataParallel(linear(), TWO)
        model(batch())
        second = DataParallel(model.module, TWO)
        second(batch())
        one_more = [(models + 1, graphs) for models, graphs in before]
        assert holdings(executor) == one_more
        del model
        assert holdings(executor) == one_more
        del second
        assert holdings(executor) == before
    finally:
        gc.enable()
    assert DataParallel(Pids(), TWO)(batch(2)).tolist() == pids


@on_cluster
def test_dropping_an_output_frees_its_graph() -> None:
    """A graph lives as long as something that leads to it, or until a backward that does not retain
    it.
    """
    model = DataParallel(linear(), TWO)
    executor = model.executor
    model(batch()).sum().backward()

    def graphs() -> list[int]:
        return [count for _, count in holdings(executor)]

    before = graphs()
    out = model(batch())
    kept = out.sum()
    assert graphs() == [n + 1 for n in before]
    del out
    assert graphs() == [n + 1 for n in before]
    del kept
    assert graphs() == before
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    assert graphs() == [n + 1 for n in before]
    loss.backward()
    assert graphs() == before
    with torch.no_grad():
        kept = model(batch())
    assert graphs() == before and not kept.requires_grad


@on_cluster
def test_a_graph_outlives_its_wrapper() -> None:
    """An output can be differentiated though wrapper and model are gone elsewhere."""
    net = linear()
    loss = DataParallel(net, TWO)(batch()).sum()
    loss.backward()
    torch.testing.assert_close(net.weight.grad, batch().sum(0).expand(2, 4))


# --- device_ids ---


@on_cluster
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (None, [0, 1]),
        ([0, 1], [0, 1]),
        ([1, 0], [1, 0]),
        ([1], [1]),
        (range(2), [0, 1]),
        ([torch.device("cuda", 1), torch.device("cuda:0")], [1, 0]),
        (["cuda:1", "cuda:0"], [1, 0]),
        ([torch.device("cuda"), "cuda:1"], [0, 1]),
        (["cpu", torch.device("cpu")], TWO),
        (["cpu"] * 4, ["cpu"] * 4),
        ([0, "cpu", 1], [0, "cpu", 1]),
        (("cpu", "cuda:1"), ["cpu", 1]),
        ([0, 0], [0, 0]),
        ([1, 0, 1], [1, 0, 1]),
    ],
)
def test_device_ids_of_every_kind(ids: Any, expected: list[Any]) -> None:
    """Fake GPUs, CPUs, mixed and repeated: each entry runs a chunk, the same entry the same
    process.
    """
    net = linear()
    model, plain = DataParallel(net, ids), copy.deepcopy(net)
    assert model.device_ids == expected
    x = batch(8)
    out = model(x)
    torch.testing.assert_close(out, plain(x))
    out.square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_grads(net, plain)
    pids = DataParallel(Pids(), ids)(torch.ones(len(expected), 1)).tolist()
    known = {info.pid: info for info in model.executor.replicas()}
    assert [known[pid].device_id for pid in pids] == expected
    assert len(set(pids)) == len({e for e in expected if e != "cpu"}) + expected.count("cpu")


@on_cluster
def test_a_fake_gpu_is_a_cpu_replica() -> None:
    """Ray counts it; the process behind it computes on a CPU."""
    model = DataParallel(linear(), [0, 1])
    model(batch())
    found = [info for info in model.executor.replicas() if info.device_id in (0, 1)]
    assert [(info.device_id, info.device, info.gpu, info.gpu_uuid) for info in found] == [
        (0, "cpu", "", ""),
        (1, "cpu", "", ""),
    ]


class Environment(nn.Module):
    """Says what a replica's process has in its environment."""

    def forward(self, x: torch.Tensor) -> list[str | None]:
        """Which GPUs CUDA would see, and what the driver's program has set."""
        return [
            os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
        ]


@pytest.mark.long
@on_cluster
def test_a_replica_sees_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU alone, none on a CPU; and the driver's variables, though the cluster was there before
    they were set.
    """
    seen = [replica(torch.ones(1))[0] for replica in replicate(Environment(), [0, 1, "cpu"])]
    assert seen == ["0", "1", ""]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with Executor(["cpu"], options=Options(metrics=False)) as executor:
        (replica,) = replicate(Environment(), ["cpu"], executor=executor)
        assert replica(torch.ones(1)) == ["", ":16:8"]


# --- processes of their own, where the suite's Ray would disturb ---


PRINTED = "what the program printed"
"""A program that puts this into ``found`` finds there what it printed."""


def script(code: str, running: str | None = None, **environment: str) -> dict[str, Any]:
    """Run a program in a process of its own; returns what it put into ``found``.

    It finds no Ray but one that is ``running`` at an address, as `ray start` notes it down.
    """
    temporary = tempfile.mkdtemp(prefix="rp", dir="/tmp")  # short: Ray's sockets have long names
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RAY_ADDRESS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    }
    if running is not None:
        Path(temporary, "ray").mkdir()
        Path(temporary, "ray", "ray_current_cluster").write_text(running)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{_PREAMBLE}\n{code}\nprint('FOUND', json.dumps(found))"],
            env=settings
            | {"PYTHONPATH": path, "RAY_TMPDIR": temporary, "CUDA_VISIBLE_DEVICES": ""}
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    assert done.returncode == 0, done.stdout
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("FOUND "))
    printed = done.stdout.replace(line, "")
    return json.loads(line.removeprefix("FOUND ").replace(PRINTED, json.dumps(printed)[1:-1]))  # type: ignore[no-any-return]


_PREAMBLE = """
import json, os
import ray, torch
from torch import nn
import raydp_parallel
from raydp_parallel import DataParallel, Executor, data_parallel

found = {}
torch.manual_seed(0)
net = nn.Linear(4, 2)
x = torch.randn(6, 4)


def error(call):
    try:
        call()
    except Exception as e:
        return [type(e).__name__, str(e)]
"""


@pytest.fixture(scope="module")
def no_gpu() -> dict[str, Any]:
    """What a program finds on a machine without GPU and without Ray."""
    return script(
        """
class Anything(nn.Module):
    def forward(self, value, *, mode):
        self.mode = mode
        return {"set": {1, 2}, "value": value, "gen": (i for i in range(3))}

import logging
found["said"] = []
heard = logging.Handler()
heard.emit = lambda record: found["said"].append(record.getMessage())
logging.getLogger("raydp_parallel").addHandler(heard)
found["not yet"] = ray.is_initialized()
model = DataParallel(net)
DataParallel(net)
logging.getLogger("raydp_parallel").removeHandler(heard)
found["ids"] = model.device_ids
found["attributes"] = [name for name in ("dim", "output_device", "src_device_obj") if hasattr(model, name)]
found["error"] = error(lambda: model.output_device)
found["why"] = [error(lambda: getattr(model, name))[1] for name in ("executor", "dim")]
found["stats"] = [str(model.stats().advice[0]), len(model.stats().replicas), model.stats()._repr_html_()[:7]]
found["state"] = list(model.state_dict())
found["same"] = torch.equal(model(x), net(x))
anything = DataParallel(Anything())
lock = object()
out = anything(lock, mode="any")
found["identity"] = out["value"] is lock and list(out["gen"]) == [0, 1, 2] and anything.module.mode == "any"
inner = torch.ones(2, 4)
DataParallel(nn.Sequential(nn.ReLU(inplace=True)))(inner.neg_())
found["in place"] = inner.tolist() == [[0.0] * 4] * 2
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    model(x)
found["ranges"] = [e.name for e in profile.events() if "DataParallel.forward" in e.name]
found["functional"] = error(lambda: data_parallel(net, x))
found["executor"] = [list(Executor().device_ids), len(Executor().replicas())]
os.environ["RAY_ADDRESS"] = "ray://127.0.0.1:10001"
found["client"] = error(lambda: DataParallel(net, ["cpu"])(x))
found["client, no ids"] = error(lambda: DataParallel(net))
del os.environ["RAY_ADDRESS"]
found["still not"] = ray.is_initialized()
"""
    )


def test_C2_no_gpu_runs_in_place(no_gpu: dict[str, Any]) -> None:
    """Without GPU and device_ids the module runs as it is; no cluster is started to find
    that out.
    """
    assert not no_gpu["not yet"] and not no_gpu["still not"]
    assert no_gpu["ids"] == [] and no_gpu["same"]
    assert no_gpu["executor"] == [[], 0]


def test_C2_in_place_has_no_other_attributes(no_gpu: dict[str, Any]) -> None:
    """Only ``module`` and ``device_ids`` exist, as upstream."""
    assert no_gpu["attributes"] == []
    kind, text = no_gpu["error"]
    assert kind == "AttributeError" and text.startswith(
        "'DataParallel' object has no attribute 'output_device'"
    )
    assert no_gpu["state"] == ["module.weight", "module.bias"]


def test_in_place_is_said_and_asked_for(no_gpu: dict[str, Any]) -> None:
    """Asked for replicas, or for what they did, it says why there are none; it is
    logged once.
    """
    for text in (*no_gpu["why"], no_gpu["stats"][0]):
        assert "the module runs in place" in text and "device_ids=['cpu', 'cpu']" in text
    assert no_gpu["stats"][1:] == [0, "<table>"]
    (said,) = no_gpu["said"]
    assert "the module runs in place" in said


def test_C2_in_place_takes_and_gives_anything(no_gpu: dict[str, Any]) -> None:
    """No scatter, gather or pickle: the very objects go in and come out, and what forward writes
    stays.
    """
    assert no_gpu["identity"] and no_gpu["in place"]


def test_C16_in_place_has_a_profiler_range(no_gpu: dict[str, Any]) -> None:
    """The range wraps the fallback, too."""
    assert no_gpu["ranges"] == ["raydp_parallel.DataParallel.forward"]


def test_F8_no_gpu_and_no_ids(no_gpu: dict[str, Any]) -> None:
    """The functional form has no fallback, as upstream's."""
    kind, text = no_gpu["functional"]
    assert kind == "RuntimeError" and text.startswith("device type could not be determined")


def test_ray_client_is_refused(no_gpu: dict[str, Any]) -> None:
    """A ray:// address is refused before anything is started, with the way out."""
    for name in ("client", "client, no ids"):
        kind, text = no_gpu[name]
        assert kind == "ClusterError" and "ray://" in text and "address='auto'" in text


@pytest.mark.long
def test_an_exception_of_a_module_is_not_printed_besides() -> None:
    """It is raised; what Ray shows of replicas' output, prints for one, does not say it a second
    time.
    """
    found = script(
        """
class Raises(nn.Module):
    def forward(self, x):
        print("a print of forward", flush=True)
        raise KeyError("odd value")

found["error"] = error(lambda: DataParallel(Raises(), ["cpu", "cpu"])(x))
found["printed"] = "what the program printed"
"""
    )
    assert found["error"][0] == "KeyError" and "odd value" in found["error"][1]
    assert "a print of forward" in found["printed"]
    assert "odd value" not in found["printed"] and "KeyError" not in found["printed"], found[
        "printed"
    ]


@pytest.mark.long
def test_a_local_ray_starts_and_a_lost_one_is_replaced() -> None:
    """CPU replicas start a local cluster; after ray.shutdown() the next use starts another;
    shutdown() ends it.
    """
    found = script(
        """
expected = net(x)
model = DataParallel(net, ["cpu", "cpu"])
found["lazy"] = not ray.is_initialized()
out = model(x)
found["first"] = torch.allclose(out, expected) and ray.is_initialized()
pids = [info.pid for info in model.executor.replicas()]
ray.shutdown()
found["lost"] = error(lambda: out.sum().backward())
again = model(x)
again.sum().backward()
found["second"] = torch.allclose(again, expected) and torch.allclose(net.weight.grad, x.sum(0).expand(2, 4))
found["new processes"] = not set(pids) & {info.pid for info in model.executor.replicas()}
raydp_parallel.shutdown()
raydp_parallel.shutdown()
found["ended"] = not ray.is_initialized()
"""
    )
    kind, text = found.pop("lost")
    assert kind == "GraphLost" and "run forward again" in text
    assert set(found.values()) == {True}, found


@pytest.mark.long
@on_cluster
def test_shutdown_leaves_a_cluster_that_is_its_users() -> None:
    """The process's replicas end, the cluster goes on, and so do wrappers, with new replicas."""
    model = DataParallel(linear(), TWO)
    out, executor = model(batch()), model.executor
    raydp_parallel.shutdown()
    assert ray.is_initialized()
    assert {info.state for info in executor.replicas()} == {"closed"}
    with Executor([0, 1]) as own:  # the GPUs are free now
        assert torch.equal(DataParallel(model.module, executor=own)(batch()), out)
    with Executor([1, 0]) as own:  # nor after close
        assert torch.equal(DataParallel(model.module, executor=own)(batch()), out)
    assert model.executor is not executor
    assert torch.equal(model(batch()), out)


@pytest.mark.long
@on_cluster
@pytest.mark.parametrize("how", ["RAY_ADDRESS", "running"])
def test_ray_address_is_joined(how: str) -> None:
    """A driver joins the cluster that RAY_ADDRESS names or that runs here, sees its GPUs, and
    leaves it running.
    """
    address = ray.get_runtime_context().gcs_address
    found = script(
        """
model = DataParallel(net)
found["ids"] = model.device_ids
found["address"] = ray.get_runtime_context().gcs_address
out = DataParallel(net, ["cpu", "cpu"])(x)
found["same"] = torch.allclose(out, net(x))
raydp_parallel.shutdown()
""",
        **{how: address},
    )
    assert found == {"ids": [0, 1], "address": address, "same": True}
    assert DataParallel(linear(), TWO)(batch()).shape == (6, 2)


@pytest.mark.long
def test_replicas_with_another_version_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of this package, for messages would be misread; of torch and NumPy it is said, for results
    may differ.
    """
    own, torchs, numpys = module_sources.versions()
    monkeypatch.setattr(
        module_sources, "versions", lambda: ((own[0], "9.9 (abcd)"), torchs, numpys)
    )
    with pytest.raises(
        PlacementError,
        match=rf"has raydp_parallel {re.escape(own[1])}, the driver has raydp_parallel 9\.9 "
        r"\(abcd\): inst",
    ):
        Executor(["cpu"])
    monkeypatch.setattr(module_sources, "versions", lambda: (own, ("torch", "1.0"), numpys))
    with Executor(["cpu"]) as executor:
        assert torch.equal(
            DataParallel(nn.Identity(), executor=executor)(torch.ones(2)), torch.ones(2)
        )
    assert f"has torch {torchs[1]}, the driver has torch 1.0: results may differ" in caplog.text
