"""Waits: each has an end, whatever stops or dies; and what is no death ends no replica."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import limited, printed, raised
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, ExecutorClosed, Options, ReplicaDied
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.start import Starter
from raydp_parallel.driver import groups
from raydp_parallel.driver.dispatcher import Dispatcher
from raydp_parallel.errors import PlacementError
from raydp_parallel.replica.module import ReplicaModule
from raydp_parallel.wire.channel import _HEADER, Channel
from raydp_parallel.wire.group import Abandoned, Exchange, close_store, open_store
from raydp_parallel.wire.messages import Seat

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
X = torch.arange(32.0).view(4, 8) / 32


class Net(nn.Linear):
    """Takes what else it is given along with its rows."""

    def forward(self, x: Tensor, blob: str = "") -> Tensor:
        """Ignore it."""
        return super().forward(x)


def trained(executor: Executor) -> tuple[DataParallel[Any], Any]:
    """A model with an optimizer in the replicas, which have made a step, and gradients."""
    torch.manual_seed(0)
    model = DataParallel(Net(8, 2), executor=executor)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        if not step:
            optimizer.step()
    model.sync()
    return model, optimizer


def stop(executor: Executor, number: int = 1) -> None:
    """Stop a replica, and wait until all of its threads have stopped."""
    pid = executor.replicas()[number].pid
    os.kill(pid, signal.SIGSTOP)
    threads = [*Path(f"/proc/{pid}/task").iterdir()]
    while any("(stopped)" not in (thread / "status").read_text() for thread in threads):
        time.sleep(0.001)


@contextlib.contextmanager
def lowered(what: int, soft: int) -> Iterator[None]:
    """This process has a limit inside of the block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


# --- calls ---

CALLS: dict[str, Callable[[DataParallel[Any], Any, Tensor], Any]] = {
    "forward": lambda model, optimizer, out: model(X),
    "a request that fills the socket": lambda model, optimizer, out: model(X, "z" * 4_000_000),
    "backward": lambda model, optimizer, out: out.sum().backward(),
    "clip": lambda model, optimizer, out: optimizer.clip_grad_norm_(1.0),
    "step": lambda model, optimizer, out: (optimizer.step(), model.sync()),
    "flush": lambda model, optimizer, out: model.executor.flush(),
    "resume": lambda model, optimizer, out: (nn.init.ones_(next(model.parameters())), model(X)),
}


@pytest.mark.timeout(50)  # less than a start may take
@pytest.mark.parametrize("what", [*CALLS])
def test_a_stopped_replica_does_not_stop_a_call(what: str, killable: Executor) -> None:
    """With a limit it counts as dead, and others do its part, whatever the call was doing."""
    model, optimizer = trained(killable)
    out, deaths = model(X), killable.stats().deaths
    stopped = killable.replicas()[1].pid
    with limited(killable, 0.5, lambda call: call.slot.info().pid == stopped):
        stop(killable)
        CALLS[what](model, optimizer, out)
        model.sync()
    assert killable.stats().deaths == deaths + 1


@pytest.mark.parametrize("length", [100, 1 << 60])
def test_a_frame_that_does_not_go_on(length: int) -> None:
    """The limit holds for all of it, and no memory is taken for what does not come."""
    ours, theirs = socket.socketpair()
    theirs.sendall(_HEADER.pack(length, length) + b"the rest is late")
    with pytest.raises(TimeoutError):
        Channel(ours).receive(0.1)
    theirs.close()
    ours.close()


def test_memory_that_there_is_no_descriptor_for() -> None:
    """The error says so, and the channel does not go on with memory that it lacks."""
    ours, theirs = socket.socketpair()
    receiver, sender = Channel(ours), Channel(theirs)
    sender.send(torch.ones(3))
    os.close(free := os.dup(0))  # the lowest that is free: there may be gaps
    with lowered(resource.RLIMIT_NOFILE, free):
        error = raised(lambda: receiver.receive(5.0))
    # The kernel leaves the descriptor out, or lets it in and has none for its mapping.
    assert isinstance(error, OSError) and ("descriptor" in str(error) or error.errno == 24)
    assert isinstance(raised(lambda: receiver.receive(0.1)), (OSError, ValueError))
    sender.close()


def test_an_update_that_fails_is_sent_whole(executors: Any) -> None:
    """A replica that could not take over changes of the module takes over no later ones alone."""

    def break_next(net: nn.Module, x: Tensor) -> Tensor:
        bring = ReplicaModule._bring

        def fails(*_: object) -> None:
            ReplicaModule._bring = bring  # type: ignore[method-assign]
            raise OSError("as told")

        ReplicaModule._bring = fails  # type: ignore[method-assign]
        return x

    net = nn.Linear(8, 2)
    model = DataParallel(net, executor=executors())
    model.run(break_next, X)
    with torch.no_grad():
        net.weight.mul_(2)
    assert "as told" in str(raised(lambda: model(X)))
    with torch.no_grad():
        net.bias.mul_(2)
    assert torch.equal(model(X), net(X))


def test_a_limit_below_the_imports_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica's first call, and its first optimizer, are part of its start."""
    limits, limit = dict[int, list[tuple[str, Any]]](), Dispatcher._limit

    def noted(self: Dispatcher, one: Any) -> Any:
        limits.setdefault(one.slot.index, []).append((one.call.phase, limit(self, one)))
        return None

    monkeypatch.setattr(Dispatcher, "_limit", noted)
    with Executor(["cpu"] * 2, options=Options(call_timeout=20.0)) as executor:
        model = DataParallel(Net(8, 2), executor=executor)
        model(X)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
        model(X).sum().backward()
        optimizer.step()
        model.sync()
        start = executor.options.placement_timeout
    for phases in limits.values():
        first = dict(reversed(phases))
        assert first["forward"] == first["resume"] == start and len(first) > 3
        assert {limit for _, limit in phases if limit != start} == {20.0}


class Deadly(torch.optim.SGD):
    """An optimizer that ends the process in which it steps."""

    def step(self, closure: Any = None) -> Any:
        """End it."""
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_step_that_ends_whoever_makes_it(killable: Executor) -> None:
    """Is given up after a few tries."""
    model = DataParallel(Net(8, 2), executor=killable)
    optimizer = model.optimizer(Deadly, lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    with pytest.raises(ReplicaDied, match="the step ends its process"):
        model.sync()


# --- what this process lacks ---


def small(net: nn.Module, x: Tensor, size: int) -> Tensor:
    """Run forward in a process whose files may have so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return net(x)  # type: ignore[no-any-return]


def test_an_error_of_the_system_s_is_no_death() -> None:
    """A window larger than a file may be, of the driver's or of a replica's: the error is the
    system's, and the replicas live on.
    """
    with Executor(["cpu"] * 2) as new:  # others may have a large window, which is used again
        model = DataParallel(nn.Linear(64, 2), executor=new)
        model(torch.ones(4, 64))
        pids, large = [info.pid for info in new.replicas()], torch.ones(40_000, 64)
        with lowered(resource.RLIMIT_FSIZE, 1 << 20):
            assert "File too large" in str(raised(lambda: model(large)))
            assert model(torch.ones(4, 64)).shape == (4, 2)
        assert "File too large" in str(raised(lambda: model.run(small, large, 1 << 16)))
        assert model.run(small, large, -1).shape == (40_000, 2)
        assert [info.pid for info in new.replicas()] == pids
        # What the message that was not sent would have let them forget, too.
        assert [graphs for _, graphs in new.flush()] == [0, 0]


FEW = """
import os, resource
from raydp_parallel.wire.group import open_store
used = len(os.listdir("/proc/self/fd")) - 1  # the listing had one itself
for host in (None, "127.0.0.1"):
    for spare in range(9):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 4096))
        try:
            open_store(2, host)
        except OSError as error:
            assert error.errno == 24, error
        else:
            assert host is None and spare, spare
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
"""


def test_a_group_with_too_few_descriptors() -> None:
    """Raises an error; in torch it would end the program."""
    printed("-c", FEW)


def test_another_process_that_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for the replica, though it is the same user's, and comes first."""
    strangers: list[socket.socket] = []
    listen = socket.socket.listen

    def listen_to(self: socket.socket, *args: int) -> None:
        listen(self, *args)
        strangers.append(socket.socket(socket.AF_UNIX))
        strangers[-1].connect(self.getsockname())

    monkeypatch.setattr(socket.socket, "listen", listen_to)
    options = Options(call_timeout=5.0, placement_timeout=30.0)
    with Executor(["cpu"], options=options) as executor:
        model = DataParallel(nn.Linear(2, 2), executor=executor)
        torch.testing.assert_close(model(torch.ones(2, 2)), model.module(torch.ones(2, 2)))
        assert strangers and executor.stats().deaths == 0
    for one in strangers:
        one.close()


# --- groups ---


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["memory", "port"])
def test_a_group_that_is_gone_cannot_be_joined(host: str | None) -> None:
    """Its members see that, and who is late gets it for an answer, and not a group's patience."""
    store, address = open_store(2, host)

    def member(rank: int) -> Exchange:
        return Exchange(Seat("a group", rank, 2, 300.0, address=address), CPU)

    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(member, range(2))]
        rows = pool.map(lambda one: one.swap(torch.tensor([[one.rank]] * 2)).tolist(), both)
        assert [*rows] == [[[0], [1]]] * 2
    close_store(store)
    del store
    assert not any(one.exists() for one in both)
    with pytest.raises(Abandoned):
        member(0)
    for one in both:
        one.close()


@pytest.mark.parametrize("limit", [None, 10.0])
def test_a_death_while_another_joins(
    limit: float | None, killable: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that joins late neither waits for the dead, nor counts as one that hangs."""
    join, close = groups._join, groups.Group.close

    def dying(dispatcher: Dispatcher, slots: Any, group: Any) -> Any:
        late, dead = (slot.hello.pid for slot in slots)
        os.kill(dead, signal.SIGKILL)
        os.kill(late, signal.SIGSTOP)

        def left(group: Any) -> None:
            close(group)
            os.kill(late, signal.SIGCONT)

        monkeypatch.undo()
        monkeypatch.setattr(groups.Group, "close", left)
        return join(dispatcher, slots, group)

    deaths, found = killable.stats().deaths, []
    for disturbed in (False, True):
        model, optimizer = trained(killable)
        killable.dispatcher.close_groups()
        if disturbed:
            monkeypatch.setattr(groups, "_join", dying)
        with limited(killable, limit):
            optimizer.step()
            found.append(model.module.weight.clone())
    assert torch.equal(*found)
    assert killable.stats().deaths == deaths + 1


# --- beginnings and ends ---


@pytest.mark.long
def test_a_replica_that_stops_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start fails when its time is over."""
    meet = Starter._meet

    def stopped(self: Starter, actor: Any, hello: Any, *rest: Any) -> Any:
        os.kill(hello.pid, signal.SIGSTOP)
        return meet(self, actor, hello, *rest)

    monkeypatch.setattr(Starter, "_meet", stopped)
    with pytest.raises(PlacementError, match="did not connect within placement_timeout=30 s"):
        Executor(["cpu"], options=Options(placement_timeout=30))


def test_a_start_ends_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when its time is over."""
    monkeypatch.setattr(ray_api, "late", lambda refs: refs)
    monkeypatch.setattr(ray_api, "living", frozenset)
    with pytest.raises(PlacementError, match="nodes ended: "):
        Executor(["cpu"])


@pytest.mark.parametrize("another", [pytest.param(False, marks=pytest.mark.long), True])
def test_closing_waits_for_nobody_that_hangs(another: bool) -> None:
    """The last fetch has a limit, and a call that another thread waits for is ended."""
    model, optimizer = trained(executor := Executor(["cpu"]))
    optimizer.step()
    executor.flush()
    object.__setattr__(executor.options, "placement_timeout", 0.3)
    client: Any = executor.slots(["cpu"])[0].client
    receive, waits = client.receive, threading.Event()
    client.receive = lambda *how: waits.set() or receive(*how)
    stop(executor, 0)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(lambda: (not another or waits.wait(), executor.close()))
        if another:
            with pytest.raises(ExecutorClosed):
                model(X)
        end.result()


def test_threads_ask_at_once_whether_a_replica_runs(two: Executor) -> None:
    """One ends it while another one says how it ended."""
    client: Any = two.slots(["cpu"])[0].client
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(client.ended)
        while not saying.done():
            assert client.alive()
