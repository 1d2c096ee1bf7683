"""The direct line, and what all calls to a replica have in common, whichever way they take."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.cluster import Pending, RayBackend, ReplicaClient, client
from raydp_parallel.cluster.backend import Death
from raydp_parallel.devices import process
from raydp_parallel.devices.buffers import Arena, Descriptor
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport import direct_connection, handshake, links
from raydp_parallel.transport.links import Delivered, Deliveries, InlineLink, Mappings
from raydp_parallel.transport.message_bytes import METHODS, pack
from raydp_parallel.transport.messages import Forget


class Station:
    """A thread that serves a line, and the lines that call it."""

    def __init__(
        self, answer: Callable[[int, list[Any]], Sequence[Any]], host: str | None = None
    ) -> None:
        found = handshake.listen(host)
        assert found is not None
        self.address, listener = found
        self.thread = threading.Thread(
            target=direct_connection.serve, args=(listener, answer), daemon=True
        )
        self.thread.start()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["near", "far"])
def echo(request: pytest.FixtureRequest) -> Iterator[direct_connection.Connection]:
    """A line to a peer that says everything back, on this machine and as if on another."""
    station = Station(lambda number, buffers: [bytes([number]), *buffers], request.param)
    caller = direct_connection.Connection(station.address, list)
    yield caller
    caller.close()
    station.thread.join(10)
    assert not station.thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3_000_001])
def test_buffers_of_every_size_arrive(echo: direct_connection.Connection, size: int) -> None:
    """Small ones as bytes, large ones as arrays of their own."""
    sent = np.arange(size, dtype=np.uint8)
    echo.send(1, [b"header", sent])
    head, header, found = echo.receive(1, 10)
    assert (head, bytes(header)) == (b"\x01", b"header")
    assert bytes(found) == sent.tobytes()


def test_shared_memory_travels_as_a_descriptor() -> None:
    """The bytes are not copied into the socket."""
    lent = Arena().take(1 << 20)
    lent.array[:] = 3
    station = Station(lambda number, buffers: [repr(buffers[0]).encode()])
    caller = direct_connection.Connection(station.address, list)
    caller.send(2, [lent])
    (text,) = caller.receive(2, 10)
    assert eval(text, {"Descriptor": Descriptor}) == lent.descriptor
    piece = Mappings().find(lent.descriptor).piece()
    assert ctypes.string_at(piece.address, piece.size) == bytes([3]) * (1 << 20)
    caller.close()


def test_answers_nobody_waits_for_are_dropped(echo: direct_connection.Connection) -> None:
    """An answer that comes late is never taken for a newer one."""
    echo.send(1, [b"old"])
    echo.give_up(1)
    echo.send(2, [b"new"])
    assert [bytes(part) for part in echo.receive(2, 10)] == [b"\x02", b"new"]


def test_answers_may_be_taken_in_any_order(echo: direct_connection.Connection) -> None:
    """Each call gets its own."""
    for number in (1, 2, 3):
        echo.send(number, [bytes([number]) * 3])
    for number in (3, 1, 2):
        assert bytes(echo.receive(number, 10)[1]) == bytes([number]) * 3


def test_who_looks_waits_for_nothing(echo: direct_connection.Connection) -> None:
    """Several lines are watched together; which answers are there is asked of each."""
    assert echo.look([1]) == set()
    echo.send(1, [b"one"])
    echo.send(2, [b"two"])
    assert echo.waits_for() == 2 and echo.wire.file() > 0
    while echo.look([1, 2]) != {1, 2}:
        pass
    assert bytes(echo.receive(2, None)[1]) == b"two" and bytes(echo.receive(1, None)[1]) == b"one"
    echo.close()
    assert echo.wire.file() == -1 and echo.look([3]) == {3}
    with pytest.raises(direct_connection.LineCut):
        echo.receive(3, None)


def test_the_word_of_many_leases_is_an_array() -> None:
    """More than some thousand end at a time where a long list of outputs is dropped; both ends read
    it as any other.
    """
    arena = Arena()
    remote: Any = ReplicaClient(SimpleNamespace())
    near = ReplicaServer("cpu", InlineLink())
    for ledger, read in (
        (remote.memory.ledger, lambda word: remote.opened([word, b"header"])),
        (
            near._ledger,
            lambda word: near._answer_line(None, 0, [word, METHODS["forget"], pack(None)]),
        ),
    ):
        slices = [arena.take(16) for _ in range(2)]
        for one in slices:
            ledger.lend(one)
        ended = [*ledger._lent, *[0] * 5000]
        word = np.array([(lease, 1) for lease in ended], dtype=np.uint64).view(np.uint8).reshape(-1)
        assert len(word) > 1 << 16
        assert read(word) is not None
        assert not ledger._lent


def test_the_end_of_the_other_side_is_seen() -> None:
    """At once, and as what it is."""

    def hang_up(_number: int, _buffers: list[Any]) -> Sequence[Any]:
        raise OSError

    station = Station(hang_up)
    caller = direct_connection.Connection(station.address, list)
    caller.send(1, [b""])
    with pytest.raises(direct_connection.LineCut):
        caller.receive(1, 10)
    caller.close()
    caller.close()


def test_a_frame_that_stands_still() -> None:
    """The other end hangs before it has read, or answered, the whole of it."""
    held = threading.Event()

    def hang(number: int, buffers: list[Any]) -> Sequence[Any]:
        held.wait(10)
        return []

    station = Station(hang)
    caller = direct_connection.Connection(station.address, list)
    caller.wire.limit(0.2)
    caller.send(1, [b"small"])
    # more than the socket takes, and no end reads
    caller.send(2, [np.zeros(8_000_000, dtype=np.uint8)])
    with pytest.raises(TimeoutError):
        caller.receive(2, 0.1)
    held.set()
    caller.close()


def test_only_one_caller_is_let_in(echo: direct_connection.Connection) -> None:
    """The second finds no listener."""
    echo.send(1, [])
    echo.receive(1, 10)
    name = echo.wire.socket.getpeername()
    with (
        socket.socket(echo.wire.socket.family, socket.SOCK_STREAM) as second,
        pytest.raises(ConnectionRefusedError),
    ):
        second.connect(name)


class Doubled(nn.Module):
    """A parameter, so that state and gradients travel too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"direct_line": False}, {"link": "inline"}, {"link": "object_store"}]
)
def test_every_way_gives_the_same(executors: Any, options: dict[str, Any]) -> None:
    """Over the line with shared memory, as Ray tasks, and by each link, small and large."""
    for size in (3, 100_000):
        model = DataParallel(Doubled(size), executor=executors(**options))
        for _ in range(3):
            x = torch.linspace(-1, 1, 4 * size).view(4, size)
            out = model(x)
            assert torch.equal(out, x)
            model.zero_grad()
            out.sum().backward()
            assert model.module.weight.grad is not None
            torch.testing.assert_close(model.module.weight.grad, x[:2].sum(0) + x[2:].sum(0))


class Parting(nn.Module):
    """One chunk ends its process, the other waits until that is known."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        fatal = self.folder / "fatal"
        if x[0] and fatal.exists():
            fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        while not (self.folder / "known").exists():
            time.sleep(0.01)
            assert time.monotonic() < begun + 60, "nobody knows"
        return x + 1


@pytest.mark.long
@pytest.mark.parametrize("direct", [True, False])
def test_a_death_is_known_while_others_work(
    executors: Any, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be waiting for the one that died, and can be told. The first in the order of calls
    is such a one.
    """
    executor = executors(direct_line=direct, name="killable")
    deaths = executor.stats().deaths
    backend = executor.replica_set.backend
    collect = backend.collect

    def listening(pending: Any, heard: Any = None) -> Any:
        def also(number: int, answer: Any) -> None:
            if isinstance(answer, Death):
                (tmp_path / "known").touch()
            if heard is not None:
                heard(number, answer)

        return collect(pending, also)

    monkeypatch.setattr(backend, "collect", listening)
    (tmp_path / "fatal").touch()
    model = DataParallel(Parting(tmp_path), executor=executor)
    assert model(torch.arange(2.0)).tolist() == [1, 2]
    assert executor.stats().deaths == deaths + 1
    executor.grow(float("inf"))  # no thread asks Ray in the next tests, which replace its functions


def test_memory_is_recycled(executors: Any) -> None:
    """Steps of one size need no more segments than the first ones did, on either side."""
    executor = executors()
    model = DataParallel(Doubled(50_000), executor=executor)
    x = torch.ones(4, 50_000)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = []
    for _ in range(8):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        infos = executor.replicas()
        counts.append([_memory_files(pid) for pid in ("self", *(info.pid for info in infos))])
    assert counts[3] == counts[-1]
    assert all(counts[-1])


def _memory_files(pid: int | str) -> int:
    folder = f"/proc/{pid}/fd"
    found = 0
    for name in os.listdir(folder):
        try:
            found += "memfd:raydp_parallel" in os.readlink(os.path.join(folder, name))
        except FileNotFoundError:
            continue  # closed since it was listed
    return found


def test_a_full_object_store_is_nobody_s_death() -> None:
    """The caller hears of it as what it is, and the next call goes as ever."""

    def full(*_arguments: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError("no room")

    actor = SimpleNamespace(
        forward=SimpleNamespace(remote=full),
        backward=SimpleNamespace(remote=lambda *_arguments: ray.ObjectRef.from_random()),
    )
    client = ReplicaClient(actor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda found, timeout=None: found)
        with pytest.raises(ray.exceptions.ObjectStoreFullError):
            client.submit("forward", b"", [])
        assert isinstance(client.submit("backward", b"", []), Pending)


@pytest.mark.parametrize("left", [False, True])
def test_the_cause_of_a_death_is_not_asked_of_a_cluster_that_was_left(left: bool) -> None:
    """A program that leaves while a thread is inside of Ray finds its process ended; else Ray says
    what it knows.
    """
    asked: list[float] = []
    greeting, plain, get = ray.ObjectRef.from_random(), ray.wait, ray.get

    def wait(refs: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
        if greeting not in refs:  # of a thread that starts another test's replica
            return plain(refs, **how)
        asked.append(how["timeout"])
        return ([], refs) if left or len(asked) < 3 else (refs, [])

    def dead(ref: Any, **how: Any) -> Any:
        if ref is not greeting:
            return get(ref, **how)
        raise ray.exceptions.RayActorError(error_msg="The actor is dead because it was killed.")

    client = ReplicaClient(SimpleNamespace(hello=SimpleNamespace(remote=lambda: greeting)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "wait", wait)
        patch.setattr(ray, "get", dead)
        found = client.cause_of_end(60.0, lambda: not left or len(asked) < 2)
    assert found == (None if left else "it was killed")
    assert asked == [0] * (2 if left else 3)


def test_a_call_waits_for_those_in_front_of_it() -> None:
    """Also of other threads: each has its own ``call_timeout``, and one that has to wait is no
    replica that hangs.
    """
    actor = SimpleNamespace(
        forward=SimpleNamespace(remote=lambda *_arguments: ray.ObjectRef.from_random())
    )
    client = ReplicaClient(actor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda found, timeout=None: (b"", b"header"))
        patch.setattr(ray, "wait", lambda refs, num_returns, timeout: ([], refs))
        calls: list[Any] = [client.submit("forward", b"", []) for _ in range(3)]
        assert [call.turn for call in calls] == [1, 2, 3]
        calls[0].result(None)
        calls[1].give_up()
        later: Any = client.submit("forward", b"", [])
        assert later.turn == 2
        for call in (calls[2], later):
            call.result(None)
    assert not client.unanswered


def test_calls_are_ray_tasks_where_that_is_asked(executors: Any) -> None:
    """Without a direct line each phase is a task of the actor."""
    executor = executors(direct_line=False)
    (slot,) = executor.slots(["cpu"])
    assert slot.client.line is None
    DataParallel(Doubled(2), ["cpu"], executor=executor)(torch.ones(2, 2))


class Threads(nn.Module):
    """Computes with eight helpers, and says how many threads the process has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 18))

    def forward(self, x: Tensor) -> Any:
        before = len(os.listdir("/proc/self/task"))
        out = (x * self.weight).exp().sum()
        return out.reshape(1), torch.tensor([len(os.listdir("/proc/self/task"))]), before


@pytest.mark.long
@pytest.mark.parametrize("direct", [True, False])
def test_one_thread_of_a_replica_computes(cluster: None, direct: bool) -> None:
    """Whatever else is asked of it: OpenMP gives every thread that computes helpers of its own,
    which stay.
    """
    options = Options(direct_line=direct, threads=9)
    with Executor(["cpu"], options=options) as executor:
        model = DataParallel(Threads(), executor=executor)
        (slot,) = executor.slots(["cpu"])
        counted = []
        for _ in range(4):
            out, threads, _ = model(torch.ones(1, 1 << 18))
            out.sum().backward()
            counted.append(int(threads))
            executor.show_work(0, "work")
            executor.flush()
            ray.get([slot.client.actor.hello.remote(), slot.client.actor.versions.remote()])
            backend = executor.replica_set.backend
            backend.note(slot.client, "a line")
            ray.get(slot.client.actor.work.remote("work"))
        assert max(counted) - counted[0] < 8, counted


@pytest.mark.long
@pytest.mark.skipif(
    process._openmp() is None, reason="torch computes with another library than GCC's"
)
def test_a_replica_leaves_the_cores_to_a_driver_beside_it(cluster: None) -> None:
    """Its helpers end before it answers: they would spin where the driver computes the loss."""
    with Executor(["cpu"], options=Options(threads=9)) as executor, torch.no_grad():
        model = DataParallel(Threads(), executor=executor)
        for _ in range(3):
            _, during, _ = model(torch.ones(1, 1 << 18))
            _, _, before = model(torch.ones(1, 1 << 18))
            assert before <= int(during) - 8


def test_what_ray_brings_beside_a_line() -> None:
    """In the order of messages; what came for one that was lost goes with the next."""
    deliveries = Deliveries()
    for number in (1, 2):
        deliveries.arrive(number, f"weights {number}")
    assert deliveries.take(Delivered(2), 0) == "weights 2"
    assert not deliveries._arrived
    deliveries.arrive(1, "late")
    assert not deliveries._arrived
    with pytest.raises(TimeoutError, match="brought no weights"):
        deliveries.take(Delivered(3), 0)
    late = threading.Timer(0.01, deliveries.arrive, (3, "weights 3"))
    late.start()
    assert deliveries.take(Delivered(3), 60) == "weights 3"


@pytest.mark.long
def test_what_lies_in_the_object_store_comes_over_a_line(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all replicas, and the calls stay where they were: no one of them is a task."""
    monkeypatch.setattr(client, "SHARE_LIMIT", 1 << 16)
    monkeypatch.setattr(links, "SHARE_LIMIT", 1 << 16)
    monkeypatch.setattr(client, "shows", lambda *_: False)  # as on two machines
    plain = Doubled(100_000)
    with Executor(["cpu", "cpu"]) as executor:
        model = DataParallel(copy.deepcopy(plain), executor=executor)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, plain)]
        for step in range(3):
            x = torch.full((4, 100_000), float(step))
            for net, optimizer in zip((model, plain), optimizers, strict=True):
                net.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            torch.testing.assert_close(model.module.weight, plain.weight)
        clients = [slot.client for slot in executor.slots(["cpu", "cpu"])]
        assert all(found.line is not None and found._deliveries >= 3 for found in clients)


def test_calls_that_an_earlier_line_brought_are_not_done() -> None:
    """They come after those of the way that was chosen since, and the driver has given them up."""
    near = ReplicaServer("cpu", InlineLink())
    earlier, near._caller = near._caller, object()
    message = [b"", METHODS["forget"], pack(Forget((), ()))]
    assert near._answer_line(near._caller, 0, message)
    with pytest.raises(direct_connection.LineCut):
        near._answer_line(earlier, 0, message)
    current = near._caller
    assert near.forget(b"", message[2])
    with pytest.raises(direct_connection.LineCut):
        near._answer_line(current, 0, message)


def test_a_task_that_was_given_up_lends_nothing_for_ever(executors: Any) -> None:
    """Its answer is heard before a later call, and what it lent is given back with that."""
    size = 1 << 18
    executor = executors(direct_line=False)
    model = DataParallel(Doubled(size), ["cpu"], executor=executor)
    backend = executor.replica_set.backend
    (slot,) = executor.slots(["cpu"])
    model(torch.ones(1, size))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backend, "collect", _ctrl_c)
        model(torch.ones(1, size))
    (given_up,) = slot.client._given_up
    ray.wait([given_up])
    assert torch.equal(model(torch.ones(1, size)), torch.ones(1, size))
    assert not slot.client._given_up and not slot.client.memory.mappings.held()


def _ctrl_c(*_arguments: Any) -> Any:
    raise KeyboardInterrupt


def test_an_answer_is_taken_up_while_others_are_to_come() -> None:
    """Without listeners each answer is waited for when it is asked for, and not before."""
    waited: list[Any] = []
    backend: Any = SimpleNamespace(
        _options=Options(), _result=lambda call, _seconds: waited.append(call) or call
    )
    calls: list[Any] = [
        SimpleNamespace(turn=1, through_ray=False, held_back=False) for _ in range(2)
    ]
    answers = iter(RayBackend.collect(backend, calls))
    assert not waited and next(answers) is calls[0] and waited == calls[:1]
    assert [*answers] == calls[1:] and waited == calls
