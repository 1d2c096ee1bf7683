"""Ways that were never seen on a GPU are tried before they are used, on a fake one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import UUID, FakeGpu, installed

from raydp_parallel import Options, cluster, devices
from raydp_parallel.cluster.ray_backend import meet_on_device
from raydp_parallel.devices import cuda, streams, trials
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.transport import cuda_ipc
from raydp_parallel.transport.links import link_for, shared_link

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU, in a process that has tried nothing yet."""
    monkeypatch.setattr(cuda, "_registry", cuda._Registry())
    monkeypatch.setattr(trials, "_BUSY", 2)
    streams._beside.cache_clear()
    with installed(monkeypatch) as found:
        yield found
    streams._beside.cache_clear()


def lost(*_: object) -> None:
    """Nothing: what should have been waited for is not."""


def never(*_: object) -> None:
    """As CUDA does now and then: no answer."""
    threading.Event().wait()


def fail(*_: object) -> None:
    """As CUDA refuses."""
    raise RuntimeError("CUDA error: operation not supported")


WRONG = {"wrong order": lost, "no end": never, "refused": fail}


@pytest.mark.parametrize("how", [*WRONG, "right"])
def test_registered_memory(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Both directions, before the first segment is registered."""
    monkeypatch.setattr(trials, "LIMIT", 0.2 if how == "no end" else 60.0)
    if how in WRONG:
        monkeypatch.setattr(cuda.DeviceBytes, "wait", WRONG[how])
    segments = [Arena(pin=devices.pinner(CPU)).take(100) for _ in range(2)]
    for lent in segments:
        assert (lent.array.ctypes.data in fake.pinned) == (how == "right")
    told = [r.getMessage() for r in caplog.records if "gpu_paths=['registered']" in r.getMessage()]
    assert len(told) == (how != "right")
    if how == "right":  # the trial's memory, which goes again, and that of two segments
        assert len(fake.registering) == 4


class Watched:
    """A lock that says when it is asked for."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.asked.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_nothing_is_registered_before_the_trial_has_ended(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no other thread either."""
    lock, found = Watched(), list[Any]()
    monkeypatch.setattr(cuda._registry, "_trying", lock, raising=False)
    pin: Any = devices.pinner(CPU)
    other = threading.Thread(target=lambda: found.append(pin(4096, 64)))

    def trial(*_: object) -> bool:
        assert lock.asked.acquire(timeout=30)  # by this thread
        other.start()
        assert lock.asked.acquire(timeout=30)
        return False

    monkeypatch.setattr(trials, "passes", trial)
    assert pin(8192, 64) is None
    other.join(30)
    assert found == [None]
    assert not fake.pinned


@pytest.mark.parametrize("how", [*WRONG, "right"])
def test_copies_beside_backward(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Once for the process."""
    monkeypatch.setattr(trials, "LIMIT", 0.2 if how == "no end" else 60.0)
    if how in WRONG:
        monkeypatch.setattr(devices.Courier, "finish", WRONG[how])
    assert [devices.courier(CPU) is not None for _ in range(2)] == [how == "right"] * 2
    told = [r.getMessage() for r in caplog.records if "gpu_paths=['courier']" in r.getMessage()]
    assert len(told) == (how != "right")


def remote(client: ReplicaServer, **instead: Callable[..., Any]) -> Any:
    """The driver's side of a replica in this process."""
    names = ("share_device", "start_device")
    methods = {name: instead.get(name, getattr(client, name)) for name in names}
    actor = SimpleNamespace(**{n: SimpleNamespace(remote=m) for n, m in methods.items()})
    return cluster.ReplicaClient(actor)


@pytest.mark.parametrize("end", ["driver", "replica"])
def test_memory_of_the_gpu_that_is_as_it_was_before(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The second round has other bytes in the same memory: a copy that does not wait finds those of
    the first.
    """
    monkeypatch.setattr(cluster.ray_api, "get", lambda found, timeout=None: found)
    server, arena = ReplicaServer("cpu", link_for("auto")), cuda_ipc.DeviceArena(CPU)
    server.start_sharing(False)
    ours = remote(server)
    assert ours.memory.share_device(arena) == ""
    assert len(fake.shares) == 2  # one segment of each, for both rounds
    stale = remote(ReplicaServer("cpu", link_for("auto")))
    seen: dict[int, torch.Tensor] = {}
    real, sides = cuda_ipc.on_host, {"replica": 0, "driver": 1}

    def once(piece: Any) -> Any:
        side = len(seen) % 2 if len(seen) < 2 else (len(seen) - 2) % 2
        found = real(piece)
        number = len(seen)
        seen[number] = found.owner.clone()
        if number >= 2 and side == sides[end]:
            return found._replace(owner=seen[number - 2])
        return found

    monkeypatch.setattr(cuda_ipc, "on_host", once)
    assert (
        stale.memory.share_device(cuda_ipc.DeviceArena(CPU)) == "other bytes arrived than were sent"
    )
    assert len(seen) == 2 + 1 + sides[end]
    assert stale.memory.arena is None


def test_a_driver_that_hangs_over_a_trial_goes_on(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a thread and on a stream of its own; bytes go by the host."""
    monkeypatch.setattr(cluster.ray_api, "get", lambda found, timeout=None: found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_ipc, "_told", set())
    monkeypatch.setattr(trials, "LIMIT", 0.2)
    monkeypatch.setattr(cuda_ipc, "gpu_in_use", lambda *_: CPU)
    link: Any = cuda_ipc.DeviceLink(shared_link(Arena(), True, False))
    client = remote(ReplicaServer("cpu", link_for("auto")))
    monkeypatch.setattr(cuda_ipc, "on_host", never)
    meet_on_device(client, ReplicaHello(1, "n", "cuda:0", "G", UUID, 1, 1), link)
    assert not link.arenas
    assert "no end within 0.2 s" in caplog.text


def test_a_trial_keeps_the_caller_s_modes_out(fake: FakeGpu) -> None:
    """Replicas may start under inference mode; tensors of the trial are plain ones."""
    with torch.inference_mode():
        modes: list[bool] = []
        assert (
            trials.outcome(CPU, lambda: modes.append(torch.is_inference_mode_enabled()) is None)
            == ""
        )
        assert trials.outcome(CPU, lambda: False) == "other bytes arrived than were sent"
    assert modes == [False]


def test_paths_are_named() -> None:
    """By default there is the host's alone, and it is always there."""
    assert Options().gpu_paths == ("host",)
    assert Options(gpu_paths=["nccl", "ipc"]).gpu_paths == ("host", "ipc", "nccl")
    assert Options(gpu_paths=("ipc",)) == Options(gpu_paths=("host", "ipc"))
    assert Options(gpu_paths=["peer"]).gpu_paths == ("host", "ipc", "peer")
    assert hash(Options(gpu_paths=["ipc"])) == hash(Options(gpu_paths=("ipc",)))
    with pytest.raises(
        ValueError, match=r"expected some of host, registered, ipc, peer, courier, nccl"
    ):
        Options(gpu_paths=("nvlink",))  # type: ignore[arg-type]
    for wrong in ("ipc", 3, None):
        with pytest.raises(TypeError, match=r"expected names, such as \('ipc', 'courier'\)"):
            Options(gpu_paths=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", [(), ("registered",)])
def test_nothing_is_registered_by_default(fake: FakeGpu, paths: Any) -> None:
    """Neither a replica's own memory nor that of the driver which it maps."""
    server = ReplicaServer("cpu", link_for("auto"), paths=paths)
    server.start_sharing(True)
    server._link.send([devices.piece(torch.ones(300))], [0], 1200)
    probe = Arena().take(1 << 20)
    server._mappings.find(probe.descriptor).piece()
    assert (fake.asked_to_pin > 0) == bool(paths)
