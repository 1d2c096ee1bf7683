"""What a GPU refuses, on a fake one: errors that stay, memory that cannot be registered, shared or
opened.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import ASSERTION, UUID, FakeGpu, installed
from torch import Tensor, nn
from torch.multiprocessing import reductions

import raydp_parallel
from raydp_parallel import cluster, devices
from raydp_parallel.calls import executor
from raydp_parallel.cluster import in_process
from raydp_parallel.cluster.backend import Death
from raydp_parallel.cluster.client import Pending
from raydp_parallel.cluster.ray_backend import meet_on_device
from raydp_parallel.devices import cuda, process
from raydp_parallel.devices.buffers import Arena, Descriptor, LeaseTable
from raydp_parallel.devices.ranges import MemoryRange, ReplicaHello
from raydp_parallel.options import Options
from raydp_parallel.replica.replica import Replica
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import cuda_ipc, handshake
from raydp_parallel.transport.direct_connection import Connection
from raydp_parallel.transport.links import InlineLink, Mappings, link_for, shared_link
from raydp_parallel.transport.message_bytes import METHODS, pack, unseal
from raydp_parallel.transport.messages import Forget

CPU = torch.device("cpu")
SECOND = torch.device("cpu", 1)
IN_PROCESS = Options(in_process=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU, and a process that has not used one yet."""
    monkeypatch.setattr(cuda, "_registry", cuda._Registry())
    cuda._registry._tried = True  # with success
    monkeypatch.setattr(cuda_ipc, "_told", set())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with installed(monkeypatch) as found:
        yield found
    executor.shared(IN_PROCESS).close()


# --- errors that stay ---


def test_the_answer_leaves_after_an_assertion_failed(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a line, with the assertion's text, though events of uploads are asked that only
    raise.
    """
    client = ReplicaServer("cpu", InlineLink())
    monkeypatch.setattr(ReplicaServer, "_follow", lambda *_: None)

    def forward(*_: Any) -> None:
        source = torch.zeros(64, dtype=torch.uint8).numpy()
        cuda.upload(MemoryRange(source.ctypes.data, 64, source), CPU)  # as the inputs of each call
        fake.fail_later()
        devices.finish(CPU)

    monkeypatch.setattr(client._replica, "forward", forward)
    address, listener = handshake.listen(None) or pytest.fail("no sockets here")
    serving = threading.Thread(target=client._serve, args=(None, listener, True), daemon=True)
    serving.start()
    line = Connection(address, lambda _buffers: None)
    line.send(0, [b"", METHODS["forward"], pack(None)])
    reply, _ = unseal(tuple(line.receive(0, 30)[1:]), InlineLink())
    assert ASSERTION in reply.failure.text
    assert client._spoiled
    line.close()
    serving.join(30)


_gpus: list[FakeGpu] = []


class Asserts(nn.Module):
    """Writes to a buffer, and fails an assertion on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        if x[0, 0] < 0:
            _gpus[-1].broken = ASSERTION
        return out


def test_what_is_seen_after_the_module_is_its_error_too(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In upstream's words: buffers are compared with the driver's when the assertion has failed
    already.
    """
    ended: list[str] = []
    _gpus.append(fake)
    monkeypatch.setattr(ReplicaServer, "_end", lambda _client: ended.append("ended"))
    isolated = in_process._isolated

    @contextlib.contextmanager
    def replica() -> Iterator[None]:
        with isolated():
            yield
        if fake.broken:  # which only the replica's process was
            fake.current_stream().drop()
            fake.broken = ""

    monkeypatch.setattr(in_process, "_isolated", replica)
    model = raydp_parallel.DataParallel(Asserts(), ["cpu", "cpu"], options=IN_PROCESS)
    x = torch.rand(4, 3)
    model(x)
    with pytest.raises(RuntimeError, match=rf"(?s)Caught RuntimeError in replica 0.*{ASSERTION}"):
        model(-x)
    assert model(x).shape == (4, 3)
    assert ended == ["ended"] * 2


# --- which GPU, and whether CUDA starts there ---


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str | None]:
    """What CUDA would see; nothing was said about it yet."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(process, "_DRIVER", ())
    return lambda: os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_replica_sees_the_gpu_that_ray_gave(
    visible: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray was told not to say so to CUDA, as vLLM and others do: else all would be on
    the first GPU.
    """
    assert devices.take_given("gpu", ["2"]) == "cpu"  # of this machine, which only counts it
    assert visible() == "2"
    assert devices.take_given("cpu", []) == "cpu"
    assert visible() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert devices.take_given("gpu", ["MIG-7"]) == "cuda:0"
    assert visible() == "MIG-7"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices.take_given("gpu", ["MIG-7"]) == "cuda:0"
    with pytest.raises(
        RuntimeError,
        match="CUDA started in this process before it could be told to see GPU 3 alone",
    ):
        devices.take_given("gpu", ["3"])


@pytest.mark.usefixtures("visible")
def test_cuda_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is a GPU; to compute on the CPU would be a hundred times as slow, without
    a word of why.
    """

    def busy(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch, "zeros", busy)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(process, "_DRIVER", (str(tmp_path),))
    assert devices.take_given("gpu", ["1"]) == "cpu"
    assert "torch is built for CPUs alone" in caplog.text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        RuntimeError,
        match=r"(?s)gave this replica GPU 1, .*does not "
        r"start.*busy.*EXCLUSIVE_PROCESS",
    ):
        devices.take_given("gpu", ["1"])
    monkeypatch.setattr(process, "_DRIVER", ())
    assert devices.take_given("gpu", ["1"]) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # CUDA counts the GPU, and cannot use it
    with pytest.raises(RuntimeError, match="does not start"):
        devices.take_given("gpu", ["1"])


# --- copies ---


def test_inputs_of_two_devices_are_waited_for_on_both(fake: FakeGpu) -> None:
    """Each has a queue of its own: the end of one says nothing of the other."""
    tensors = [torch.zeros(4), fake.put(torch.full((4,), 1.0), 1)]
    assert [t.device for t in tensors] == [CPU, SECOND]
    for order in (tensors, tensors[::-1]):
        packet = InlineLink().send([devices.piece(t) for t in order], [0, 16], 32)
        assert torch.frombuffer(bytearray(packet), dtype=torch.float32).tolist() == [
            *order[0],
            *order[1],
        ]


def test_a_refused_registration_is_nobodys_error(
    fake: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps it for the thread's next kernel; it is taken before, said once, and not asked for
    again.
    """
    fake.refuses = True
    caplog.set_level(logging.INFO, logger="raydp_parallel")
    arena = Arena(pin=devices.pinner(CPU))
    lent, other = arena.take(10), arena.take(1 << 20)
    read = MemoryRange(lent.array.ctypes.data, 4, lent)
    cuda.load_all([torch.zeros(4, dtype=torch.uint8)], [read])
    assert fake.asked_to_pin == 1
    assert (
        len([r for r in caplog.records if "cannot be pinned (CUDA error 801)" in r.getMessage()])
        == 1
    )
    x = torch.arange(4.0)
    piece = devices.piece(x)
    assert piece.origin is not None
    piece.origin.copy_to(other.array.ctypes.data)
    piece.origin.wait()
    piece.origin.settle()
    assert other.array[:16].tobytes() == x.numpy().tobytes()
    devices.finish(CPU)


def test_the_weights_of_a_gpu_are_sent_to_replicas_on_cpus(fake: FakeGpu) -> None:
    """Torch says of a GPU's memory that it is shared; no CPU can look at it."""
    link = shared_link(Arena(), exposes=True, always=True)
    net = nn.Linear(300, 200)
    with pytest.raises(RuntimeError, match="only available on CPU"):
        net.weight.untyped_storage()._share_fd_cpu_()
    tracker = ModuleTracker(net, link)
    tracker.sync()
    assert link.exposes
    assert tracker.update_from(0) is not None
    assert not tracker._contents._exposed


# --- memory of a GPU between processes ---


def sent(link: cuda_ipc.DeviceLink, x: Tensor) -> Any:
    """A tensor as a packet."""
    return link.send([devices.piece(x)], [0], x.nbytes)


def test_a_replica_that_died_is_counted_out(fake: FakeGpu) -> None:
    """Torch would keep a segment that it had open, though nothing reads there any more."""
    arena, x = cuda_ipc.DeviceArena(CPU), torch.randn(30000)
    packet, clients = arena.fill([devices.piece(x)], [0], x.nbytes), []
    for _ in range(2):
        clients.append(cluster.ReplicaClient(None))
        assert cuda_ipc.Addressed(packet, clients[-1]).descriptor.device
    assert [*fake.readers.values()] == [1, 1]
    del clients[0]
    gc.collect()
    assert [*fake.readers.values()] == [0, 1]


def test_evaluation_first_leaves_training_its_memory(fake: FakeGpu) -> None:
    """A segment that was made under inference mode is written to outside, too; and one that was
    opened is read.
    """
    link = cuda_ipc.DeviceLink(shared_link(Arena(), True, False), cuda_ipc.DeviceArena(CPU))
    opener = cuda_ipc.Opener(CPU)
    x = torch.randn(30000)
    with torch.inference_mode():
        first = sent(link, x)
        found = cuda.upload(
            MemoryRange(0, x.nbytes, None, opener(first.descriptor).part(0, x.nbytes)), CPU
        )
        assert torch.equal(found.view(torch.float32), x)
        del first
    again = sent(link, x.neg())
    assert isinstance(again, cuda_ipc.DeviceBuffer)
    found = cuda.upload(
        MemoryRange(0, x.nbytes, None, opener(again.descriptor).part(0, x.nbytes)), CPU
    )
    assert torch.equal(found.view(torch.float32), x.neg())
    assert len(fake.shares) == len(fake.opened) == 1
    assert link.name == "shared and CUDA IPC"


def test_the_owner_waits_for_its_own_copies(fake: FakeGpu) -> None:
    """Under another stream of the user's: one reads what was sent, or sends in the same memory what
    comes next, while the stream that copied has not come to it. No other process read it.
    """
    link = cuda_ipc.DeviceLink(shared_link(Arena(), True, False), cuda_ipc.DeviceArena(CPU))
    x, stream, done = torch.randn(30000), fake.stream(), list[str]()

    def sent_there(name: str) -> Any:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # the fake's
            stream.later(lambda: done.append(name))
            return sent(link, x)

    for part in (False, True):
        packet = sent_there("copied")
        piece = packet.piece.part(0, x.nbytes) if part else packet.piece
        assert torch.equal(devices.on_host(piece).owner.view(torch.float32), x)
        assert done == ["copied"]
        del packet, piece, done[:]
    packet = sent_there("copied")
    del packet
    again = sent(link, x.neg())
    devices.finish(CPU)
    assert done == ["copied"]
    assert torch.equal(devices.on_host(again.piece).owner.view(torch.float32), x.neg())
    assert len(fake.pools) == 1  # one segment, each time


def test_only_cudas_own_errors_end_the_sharing(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is a mistake, to be seen; and if the GPU works no more, that is what is
    raised.
    """
    arena = cuda_ipc.DeviceArena(CPU)
    link, x = cuda_ipc.DeviceLink(shared_link(Arena(), True, False), arena), torch.randn(30000)

    def mistake(*_: object) -> Any:
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed"
        )

    with monkeypatch.context() as patch:
        patch.setattr(arena, "take", mistake)
        with pytest.raises(RuntimeError, match="Inplace update"):
            sent(link, x)
    fake.broken = ASSERTION
    with pytest.raises(RuntimeError, match="device-side assert"):
        sent(link, x)
    fake.broken = ""
    assert link.arenas == {CPU: arena}


def test_one_pool_is_used_by_one_thread_at_a_time(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses the second."""
    arena, inside, go_on = cuda_ipc.DeviceArena(CPU), threading.Event(), threading.Event()
    make, found = cuda_ipc._DeviceSegment, []

    def slowly(length: int, device: torch.device) -> Any:
        inside.set()
        assert go_on.wait(30)
        return make(length, device)

    monkeypatch.setattr(cuda_ipc, "_DeviceSegment", slowly)
    threads = [threading.Thread(target=lambda: found.append(arena.take(1 << 20))) for _ in range(2)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert fake._recording is not None
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2


def test_a_replica_gets_the_memory_of_its_own_gpu_alone(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver sees all GPUs of its machine, and uses those on which something of its own
    lies.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda_ipc, "DeviceArena", lambda device: SimpleNamespace(device=device))
    fake.used = {1, 2}
    tried: list[tuple[int, Any]] = []
    link: Any = cuda_ipc.DeviceLink(InlineLink())
    for number, uuid in enumerate((UUID, f"{UUID}-1", f"{UUID}-2", f"{UUID}-1")):
        memory = SimpleNamespace(
            share_device=lambda arena, n=number: tried.append((n, arena.device)) or ""
        )
        client: Any = SimpleNamespace(memory=memory)
        meet_on_device(client, ReplicaHello(1, "n", "cuda:0", "G", uuid, 1, 1), link)
    one, two = torch.device("cuda", 1), torch.device("cuda", 2)
    assert tried == [(1, one), (2, two), (3, one)]
    assert {device: arena.device for device, arena in link.arenas.items()} == {one: one, two: two}


@pytest.mark.parametrize(
    "whose", ["the driver's variable", "the driver's segments", "the replica's segments"]
)
def test_memory_that_grows_is_not_even_tried(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Opening it is known to hang."""
    asked: list[str] = []
    client = ReplicaServer("cpu", link_for("auto"))

    def share_device(*given: Any) -> Any:
        asked.append("replica")
        fake.expandable = whose == "the replica's segments"
        return client.share_device(*given)

    actor = SimpleNamespace(share_device=SimpleNamespace(remote=share_device))
    monkeypatch.setattr(cluster.ray_api, "get", lambda found, timeout=None: found)
    if whose == "the driver's variable":
        monkeypatch.setenv(
            "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True"
        )
    fake.expandable = whose == "the driver's segments"
    assert "expandable segments" in cluster.ReplicaClient(actor).memory.share_device(
        cuda_ipc.DeviceArena(CPU)
    )
    assert asked == (["replica"] if whose.startswith("the replica") else [])
    assert not fake.opened


def test_a_replica_that_hangs_over_it_is_not_waited_for(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process goes on without; the trial runs beside its calls, so that these do."""
    limits: list[Any] = []

    def late(_ref: Any, timeout: float | None = None) -> Any:
        limits.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(cluster.ray_api, "get", late)
    actor = SimpleNamespace(share_device=SimpleNamespace(remote=lambda *_: None))
    client = cluster.ReplicaClient(actor)
    assert "did not say within 20 s" in client.memory.share_device(cuda_ipc.DeviceArena(CPU))
    assert limits == [20.0]
    assert client.memory.arena is None


def test_what_a_dead_replica_was_lent_is_lent_again(fake: FakeGpu) -> None:
    """It only read there. Of the machine's memory, which it may still write to, nothing is."""
    arena, host, ledger = cuda_ipc.DeviceArena(CPU), Arena(), LeaseTable()
    for lent in (arena.take(5 << 20), host.take(5 << 20)):
        ledger.lend(lent)
    del lent
    ledger.end()
    assert [sum(each.idle().values()) for each in (arena, host)] == [1, 0]


@pytest.mark.parametrize("knows", [True, False])
def test_free_segments_are_there_for_others(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """When no memory is left elsewhere; in older versions of torch a pool keeps what it has."""

    def pool(**more: bool) -> str:
        if more and not knows:
            raise TypeError("__init__() got an unexpected keyword argument 'use_on_oom'")
        return f"a pool {more}"

    monkeypatch.setattr(torch.cuda, "MemPool", pool)
    cuda_ipc.DeviceArena(CPU).take(100)
    assert fake.pools == ["a pool {'use_on_oom': True}" if knows else "a pool {}"]


def test_a_model_that_goes_leaves_its_memory_to_others(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps what is freed, and another process on that GPU cannot ask it for any."""
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("given"))
    replica = Replica(CPU)
    replica._models[3] = ReplicaModule(CPU)
    replica.forget(Forget((1,), ()))
    assert not given
    replica.forget(Forget((), (3, 4)))
    assert given == ["given"]


def test_the_files_of_an_ended_process_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch's counters of what uses a GPU's memory; no other's."""
    monkeypatch.setattr(cuda_ipc, "_COUNTERS", str(tmp_path))
    for name in ("torch_12_7_0", "torch_12_7_1", "torch_123_7_0", "other"):
        (tmp_path / name).touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / f"torch_{process.pid}_1_0").touch()
        client = cluster.ReplicaClient(None)
        client.line = SimpleNamespace(wire=SimpleNamespace(process=os.pidfd_open))  # type: ignore[assignment]  # which shows what it is
        client.watch(process.pid)
        client.end()
    cuda_ipc.clear_after(12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "torch_123_7_0"]


class Names(nn.Module):
    """Names GPUs that only the driver's process counts so."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.device("cuda", 1)
        self.places = {"first": torch.device("cuda"), "host": torch.device("cpu")}
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """On the device that it names."""
        assert self.places["host"] == CPU
        return x.to(self.place) * self.weight.to(self.places["first"])


def test_a_gpu_that_a_module_names_is_the_replicas_own() -> None:
    """Whatever number it has in the driver; the driver's module keeps it."""
    net = Names()
    model = raydp_parallel.DataParallel(net, ["cpu", "cpu"], options=IN_PROCESS)
    for _ in range(2):
        assert model(torch.ones(4, 1)).tolist() == [[1.0]] * 4
        net.places["second"] = net.place
    assert net.place == torch.device("cuda", 1)
    executor.shared(IN_PROCESS).close()


def answered(mappings: Mappings, descriptor: Descriptor) -> Any:
    """What comes of an answer that brings a GPU's memory."""
    client: Any = cluster.ReplicaClient(None)
    client.memory.mappings = mappings
    client.line = SimpleNamespace(near=True, receive=lambda *_: [b"", b"header", descriptor])
    return Pending(client, 0, None).result(None)


def test_a_replica_that_dies_behind_its_answer_is_dead(fake: FakeGpu) -> None:
    """Its memory cannot be opened any more: the chunk runs again, and no error of CUDA's is
    raised.
    """
    mappings = Mappings()
    mappings.opener = cuda_ipc.Opener(CPU)
    fake.gone = True
    found = answered(mappings, cuda_ipc.DeviceArena(CPU).take(5 << 20).descriptor)
    assert isinstance(found, Death)
    assert "invalid resource handle" in found.cause
    handle = some_handle()
    fake.gone, fake.broken = False, ASSERTION
    with pytest.raises(RuntimeError, match="device-side assert"):  # which is this process's own
        answered(mappings, Descriptor(9, "", 0, 8, 8, 7, handle))


def some_handle() -> bytes:
    """Some memory's."""
    _, shared = reductions.reduce_tensor(torch.zeros(8))
    return pickle.dumps((shared, b"event 1"))


def test_arguments_are_those_of_torch(fake: FakeGpu) -> None:
    """The fake asks for them by number and type."""
    with pytest.raises(TypeError, match="Invalid arguments"):
        reductions.rebuild_cuda_tensor(0, b"storage 0", 8)


def test_each_replica_opens_a_handle_of_its_own(fake: FakeGpu) -> None:
    """Torch counts one opening for each: with one for two replicas the first that closes it would
    free what the other still reads. A segment is shared once with each, and lent while one reads.
    """
    arena, x = cuda_ipc.DeviceArena(CPU), torch.randn(30000)
    clients = [cluster.ReplicaClient(None), cluster.ReplicaClient(None)]
    readers = [Mappings(), Mappings()]
    for client, mappings in zip(clients, readers, strict=True):
        memory = client.memory
        memory.arena, memory.shares, mappings.opener = arena, True, cuda_ipc.Opener(CPU)
    for _ in range(2):
        packet = arena.fill([devices.piece(x)], [0], x.nbytes)
        sent = [client.memory.within_reach([packet])[0] for client in clients]
        del packet
        for buffer, mappings in zip(sent, readers, strict=True):
            piece = mappings.find(buffer.descriptor).piece().part(0, x.nbytes)
            assert torch.equal(devices.on_host(piece).owner.view(torch.float32), x)
            del piece, buffer
            assert not sum(arena.idle().values())
        sent.clear()
        gc.collect()
        assert sum(arena.idle().values()) == 1
    assert sorted(fake.opened) == sorted(fake.shares)
    assert len(fake.shares) == 2
