"""Memory that is used where it lies: windows, leases and exposed storages alone, then weights and
values end to end.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import logging
import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_same_grads, assert_same_state
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, PlacementError, cluster, devices
from raydp_parallel.devices import cuda
from raydp_parallel.devices.buffers import Arena, LeaseTable
from raydp_parallel.transport.links import ForeignMemory, Mappings, shared
from raydp_parallel.transport.links.shared import Private

on_cluster = pytest.mark.usefixtures("cluster")
TWO = ["cpu", "cpu"]
BIG = 256
"""A matrix of so many rows and columns of floats is worth exposing."""
MANY = 1 << 17
"""So many floats are used where they lie."""


def text(piece: Any) -> bytes:
    """The bytes of a piece."""
    return ctypes.string_at(piece.address, piece.size)


def lent(data: bytes, arena: Arena | None = None) -> Any:
    """A slice with some bytes in it."""
    found = (arena or Arena()).take(len(data))
    found.array[:] = np.frombuffer(data, dtype=np.uint8)
    return found


# --- windows and leases ---


def test_what_is_written_to_a_window_stays_there() -> None:
    """And is dropped by a refresh, which shows what the owner wrote since."""
    source = lent(b"abcd" * 3000)
    window = Private(Mappings().find(source.descriptor), 5000, 100)
    assert text(window.piece) == (b"abcd" * 25)
    ctypes.memset(window.piece.address, 0, 10)
    assert bytes(source.array[5000:5010]) == b"abcdabcdab"
    source.array[5000:5100] = 1
    window.refresh()
    assert text(window.piece) == bytes([1]) * 100
    assert text(window.source()) == bytes([1]) * 100


def test_a_window_turns_to_other_memory_at_the_same_address() -> None:
    """If that lies as the first did; what was written is gone."""
    mappings = Mappings()
    first, second = lent(bytes(9000)), lent(bytes([7]) * 20000)
    window = Private(mappings.find(first.descriptor), 4096, 4000)
    address = window.piece.address
    ctypes.memset(address, 3, 4000)
    other = mappings.find(second.descriptor)
    assert not window.turn_to(other, 4097, 4000)
    assert not window.turn_to(other, 8192, 4001)
    assert not window.turn_to(b"bytes", 4096, 4000)
    assert window.turn_to(other, 8192, 4000)
    assert window.piece.address == address
    assert text(window.piece) == bytes([7]) * 4000
    assert text(window.again().piece) == bytes([7]) * 4000


def test_a_window_outlives_its_owner_s_file() -> None:
    """What was found stays as long as it is used, whatever its owner does."""
    source = lent(b"x" * 70000)
    found = Mappings().find(source.descriptor)
    window = Private(found, 0, 70000)
    del source
    gc.collect()
    assert text(window.again().piece) == b"x" * 70000


def test_a_file_that_is_another_now_is_refused() -> None:
    """Its number may have been given to another one since."""
    source = lent(b"x" * 70000)
    found = ForeignMemory(source.descriptor._replace(inode=source.descriptor.inode + 1), Mappings())
    with pytest.raises(OSError, match="not the memory that was meant"):
        found.piece()


def test_a_lease_ends_when_nobody_uses_it_and_says_how_often_it_came() -> None:
    """A window, and a tensor over it, are uses."""
    mappings, ledger = Mappings(), LeaseTable()
    source = lent(b"x" * 70000)
    for _ in range(2):
        ledger.lend(source)
    piece = mappings.find(source.descriptor).take()
    again = mappings.find(source.descriptor)
    assert piece is not None
    assert mappings.held() == {source.descriptor.lease: 2}
    del again
    assert mappings.released() == []
    del piece
    (ended,) = mappings.released()
    assert ended == (source.descriptor.lease, 2)
    ledger.returned(*ended)
    assert len(ledger) == 0 and mappings.held() == {}


def test_a_ledger_counts_how_often_a_slice_is_on_its_way() -> None:
    """The word that it is no longer used may cross with the next sending."""
    ledger, source = LeaseTable(), lent(b"x")
    ledger.lend(source)
    ledger.lend(source)
    ledger.returned(source.descriptor.lease, 1)
    assert len(ledger) == 1
    ledger.returned(12345, 1)
    ledger.returned(source.descriptor.lease, 1)
    assert len(ledger) == 0


def test_a_ledger_settles_by_what_the_other_side_holds() -> None:
    """After a line broke: what did not arrive is not lent."""
    ledger, held, lost = LeaseTable(), lent(b"x"), lent(b"y")
    for source in (held, held, lost):
        ledger.lend(source)
    ledger.settle({held.descriptor.lease: 1, 999: 4})
    assert len(ledger) == 1
    ledger.returned(held.descriptor.lease, 1)
    assert len(ledger) == 0


def test_a_crowd_is_copied() -> None:
    """Each packet in use keeps a file open: there is a limit."""
    mappings, arena = Mappings(), Arena()
    sources = [lent(b"x" * 10, arena) for _ in range(70)]
    pieces = [mappings.find(source.descriptor).take() for source in sources]
    assert sum(piece is not None for piece in pieces) == 64
    del pieces
    assert mappings.find(sources[0].descriptor).take() is not None


def test_segments_that_others_are_preferred_to_go_back_to_the_system() -> None:
    """So that a large batch, once, does not stay for good."""
    arena = Arena()
    large = arena.take(1 << 24)
    path, inode = large.descriptor.path, large.descriptor.inode
    del large
    for _ in range(200):
        arena.take(100)
    assert not os.path.exists(path) or os.stat(path).st_ino != inode


class Runtime:
    """A CUDA runtime that takes down what it is asked to register."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin."""
        self.calls.append(("register", address))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin."""
        self.calls.append(("unregister", address))
        return 0


@pytest.mark.parametrize("answer", [0, 1])
def test_memory_that_a_gpu_copies_from_is_pinned_once(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is mapped; if the runtime refuses, it is used unpinned."""
    runtime, taken = Runtime(answer), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "_registry", cuda._Registry())
    cuda._registry._tried = True  # with success
    monkeypatch.setattr(cuda, "_take_error", taken.append)
    assert devices.pinner(torch.device("cpu")) is None
    mappings = Mappings(devices.pinner(torch.device("cuda", 0)))
    source = lent(b"abc" * 50000)
    for _ in range(3):
        piece = mappings.find(source.descriptor).piece()
        assert text(piece) == b"abc" * 50000
    address = piece.address
    assert runtime.calls == [("register", address)]
    del piece, mappings
    gc.collect()
    assert runtime.calls == [("register", address)] + [("unregister", address)] * (not answer)
    assert len(taken) == answer  # or the next kernel would raise what was refused


# --- exposing a storage ---


def known(tensor: Tensor) -> Any:
    """A tensor's storage, exposed if nothing else is known to look at it."""
    return shared.expose(tensor.untyped_storage(), 1)


def test_a_storage_moves_with_its_tensors() -> None:
    """Views too; and other processes see what is written afterwards."""
    tensor = torch.arange(1000.0)
    view = tensor[10:20]
    found = shared.expose(tensor.untyped_storage(), 2)
    assert found is not None
    tensor.mul_(2)
    assert view[0] == 20
    seen = Mappings().find(found.descriptor).piece()
    assert text(seen) == tensor.numpy().tobytes()
    assert shared.expose(tensor.untyped_storage(), 2) is found


def test_a_storage_that_moved_cannot_be_resized() -> None:
    """By torch's own error. Without that the process would end: torch takes it for memory of its
    allocator's.
    """
    tensor = torch.arange(1000.0)
    assert known(tensor) is not None
    for work in (lambda: tensor.resize_(2000), lambda: tensor.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match="not resizable"):
            work()
    assert torch.equal(copy.deepcopy(tensor).resize_(1500)[:1000], torch.arange(1000.0))
    assert torch.equal(tensor.resize_(10), torch.arange(10.0))


def test_only_so_many_storages_are_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a file and a mapping. One that is exposed already stays so."""
    first, second = torch.zeros(1000), torch.zeros(1000)
    found = known(first)
    monkeypatch.setattr(shared, "_MOST", len(shared._exposures.known))
    assert known(second) is None and not second.is_shared()
    assert known(first) is found
    monkeypatch.setattr(shared, "_MOST", len(shared._exposures.known) + 1)
    assert known(second) is not None


def test_a_storage_that_numpy_looks_at_stays() -> None:
    """Its address is known outside of torch, which marks it for good."""
    tensor = torch.zeros(1000)
    array = tensor.numpy()
    assert known(tensor) is None
    array[3] = 7
    assert tensor.sum().item() == 7
    del array
    assert known(tensor) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.zeros(1000)),
        lambda: torch.frombuffer(bytearray(1000), dtype=torch.uint8),
    ],
    ids=["from_numpy", "frombuffer"],
)
def test_memory_that_is_not_torch_s_stays(make: Any) -> None:
    """It cannot be moved."""
    assert known(make()) is None


def test_a_storage_that_somebody_unknown_looks_at_stays() -> None:
    """A detached copy may be one of NumPy's."""
    tensor = torch.zeros(1000)
    alias = tensor.detach()
    assert known(tensor) is None
    assert shared.expose(tensor.untyped_storage(), 2) is not None
    alias.add_(1)
    assert tensor.sum() == 1000


def test_a_storage_that_the_user_shared_is_exposed_as_it_is() -> None:
    """`share_memory_` moved it already."""
    tensor = torch.zeros(1000).share_memory_()
    before = tensor.data_ptr()
    assert known(tensor) is not None
    assert tensor.data_ptr() == before


@pytest.mark.parametrize("place", ["full", "missing"])
def test_without_room_nothing_is_exposed_and_that_is_said_once(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that is not there ends the process when it is written to."""

    class Full:
        f_bavail, f_frsize = 10, 4096

    def statvfs(path: str) -> Any:
        if place == "missing":
            raise FileNotFoundError(path)
        return Full

    monkeypatch.setattr(shared.os, "statvfs", statvfs)
    monkeypatch.setattr(shared._exposures, "said", False)
    tensor = torch.zeros(1 << 15)
    before = tensor.data_ptr()
    with caplog.at_level(logging.WARNING, logger="raydp_parallel"):
        assert known(torch.zeros(1000)) is None
        assert not caplog.records  # of so little
        assert known(tensor) is None
        assert known(torch.zeros(1 << 16)) is None
    assert tensor.data_ptr() == before
    (record,) = caplog.records
    assert "copied to the replicas" in record.message


@on_cluster
def test_what_ray_has_promised_itself_is_not_free(
    monkeypatch: pytest.MonkeyPatch, executors: Any
) -> None:
    """Its object store takes up pages one by one, in the memory that storages are moved to."""
    (node,) = [node for node in cluster.ray_api.nodes() if node.id == cluster.ray_api.here()]
    promised = int(node.free["object_store_memory"])
    assert promised > 1 << 26
    left = {"bytes": promised + (1 << 26)}

    class Free:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return left["bytes"]

    monkeypatch.setattr(shared.os, "statvfs", lambda path: Free())
    monkeypatch.setattr(shared._exposures, "said", False)
    plain = Net()
    for more, moved in ((0, False), (1 << 26, True)):
        left["bytes"] += more
        executor = executors()
        model = DataParallel(copy.deepcopy(plain), executor=executor)
        same(model, plain)
        assert model.module.first.weight.is_shared() is moved


# --- weights, end to end ---


class Net(nn.Module):
    """Large weights, a large buffer, small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(BIG, BIG, dtype=torch.float64)
        self.second = nn.Linear(BIG, BIG, dtype=torch.float64)
        self.register_buffer("scale", torch.full((BIG, BIG), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Use all."""
        return torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.scale


def data(step: int = 0) -> Tensor:
    """A batch."""
    return torch.randn(6, BIG, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def pair(cluster: None) -> tuple[Any, nn.Module]:
    """A net under the wrapper, and a plain copy."""
    torch.manual_seed(1)
    net = Net()
    return DataParallel(copy.deepcopy(net), TWO), net


def same(model: Any, plain: nn.Module) -> None:
    """A forward and backward of both, compared."""
    for one in (model, plain):
        one.zero_grad()
        one(data()).square().sum().backward()
    torch.testing.assert_close(model(data()), plain(data()))
    assert_same_grads(model, plain)


def sent(model: Any, work: Any) -> int:
    """The bytes of state that were sent meanwhile."""
    before = model.executor.stats().state_bytes
    work()
    return int(model.executor.stats().state_bytes - before)


def test_weights_are_seen_where_they_lie(pair: Any) -> None:
    """However they change in place, nothing large is sent, and nothing runs twice."""
    model, plain = pair
    same(model, plain)
    assert all(
        t.is_shared()
        for t in (model.module.first.weight, model.module.second.weight, model.module.scale)
    )
    assert not model.module.first.bias.is_shared()
    reruns = model.executor.stats().reruns

    def change(net: Any) -> None:
        with torch.no_grad():
            net.first.weight.add_(0.01)
        net.second.weight.data.mul_(1.1)
        net.scale.numpy()[0] = 3
        net.load_state_dict({name: t * 0.9 for name, t in net.state_dict().items()})

    change(model.module)
    change(plain)
    assert sent(model, lambda: same(model, plain)) <= 4 * 8 * BIG
    assert model.executor.stats().reruns == reruns


class Small(nn.Module):
    """Small weights, and batch norm, with means that replicas write to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        """Some rows."""
        out: Tensor = self.norm(self.linear(x)).tanh()
        return out


@torch.no_grad()
def nudge(*nets: nn.Module) -> None:
    """Change all weights in place."""
    for net in nets:
        for p in net.parameters():
            p.mul_(0.99)


OFTEN = 9
"""Sent so many times, a weight is seen where it lies, however small."""


@pytest.mark.long
@on_cluster
def test_small_weights_that_change_again_and_again_are_seen_where_they_lie() -> None:
    """Then they are not sent any more, and a replica that is new sees them too. What replicas write
    to stays.
    """
    model, plain = DataParallel(Small(), TWO), Small()
    plain.load_state_dict(model.module.state_dict())
    x = torch.randn(6, 4)

    def step() -> None:
        expected = torch.cat([copy.deepcopy(plain)(x[3:]).detach(), plain(x[:3]).detach()]).roll(
            3, 0
        )
        torch.testing.assert_close(model(x), expected)
        assert_same_state(model, plain)
        nudge(model.module, plain)

    for number in range(OFTEN):
        assert not model.module.linear.bias.is_shared(), number
        step()
    assert all(p.is_shared() for p in model.module.parameters())
    assert not any(b.is_shared() for b in model.module.buffers())
    model.eval()
    plain.eval()
    step()
    assert sent(model, step) == 0
    for replica in model.executor.replicas():
        os.kill(replica.pid, signal.SIGKILL)
    step()
    step()


@on_cluster
def test_a_small_weight_that_somebody_holds_stays_and_is_tried_again_later() -> None:
    """What is written by another address arrives, before it moves and after."""
    model, plain = DataParallel(Small().eval(), TWO), Small().eval()
    plain.load_state_dict(model.module.state_dict())
    x = torch.randn(2, 4)
    array = model.module.norm.bias.detach().numpy()
    alias = model.module.linear.bias.detach()
    for number in range(OFTEN):
        alias[0], array[0] = number, number
        with torch.no_grad():
            plain.linear.bias[0], plain.norm.bias[0] = number, number
        torch.testing.assert_close(model(x), plain(x))
        nudge(model.module, plain)
    assert not model.module.linear.bias.is_shared()
    assert model.module.linear.weight.is_shared()
    del alias
    for _ in range(64):
        model(x)
        nudge(model.module, plain)
    torch.testing.assert_close(model(x), plain(x))
    assert model.module.linear.bias.is_shared()
    assert not model.module.norm.bias.is_shared()


@on_cluster
def test_a_graph_from_before_a_small_weight_moved_finds_that_it_was_written_to() -> None:
    """As torch's does; and one that was made since is as good as any."""
    model, plain = DataParallel(Small().eval(), TWO), Small().eval()
    plain.load_state_dict(model.module.state_dict())
    x = torch.randn(2, 4, requires_grad=True)
    old = model(x).sum()
    for _ in range(OFTEN + 1):
        nudge(model.module, plain)
        model(x)
    assert model.module.linear.weight.is_shared()
    out, expected = model(x).sum(), plain(x).sum()
    out.backward(retain_graph=True)
    expected.backward()
    assert_same_grads(model, plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def rebind(net: Any) -> None:
    """New memory for a weight."""
    net.first.weight.data = net.first.weight.data.clone() * 2


def test_a_weight_that_is_replaced_with_each_step_is_copied(pair: Any) -> None:
    """Moving memory costs more than a copy; once it stays, it is shared again. Memory that comes
    back is known.
    """
    model, plain = pair
    same(model, plain)
    for step in range(4):
        rebind(model.module)
        rebind(plain)
        same(model, plain)
        assert model.module.first.weight.is_shared() == (step == 0)
    for _ in range(9):
        for net in (model.module, plain):
            with torch.no_grad():
                net.first.weight.mul_(0.9)
        same(model, plain)
    assert model.module.first.weight.is_shared()
    old = model.module.first.weight.data
    rebind(model.module)
    model(data())
    model.module.first.weight.data = old
    assert sent(model, lambda: same(model, plain)) == 0


def tie(net: Any) -> None:
    """One weight in two places."""
    net.second.weight = net.first.weight


def exchange(net: Any) -> None:
    """Each of two weights where the other was."""
    net.first.weight.data, net.second.weight.data = net.second.weight.data, net.first.weight.data


def cut(net: Any) -> None:
    """Parameters that are views of one storage."""
    flat = torch.cat(
        [net.first.weight.detach().reshape(-1), net.second.weight.detach().reshape(-1)]
    )
    net.first.weight = nn.Parameter(flat[: BIG * BIG].view(BIG, BIG))
    net.second.weight = nn.Parameter(flat[BIG * BIG :].view(BIG, BIG))


CHANGES: dict[str, Any] = {
    "p.data = q": rebind,
    "half and back": lambda net: net.half().double(),
    "float and back": lambda net: net.float().double(),
    "to": lambda net: net.to(torch.bfloat16).to(torch.float64),
    "load_state_dict, assigned": lambda net: net.load_state_dict(
        {name: t.clone() * 2 for name, t in net.state_dict().items()}, assign=True
    ),
    "tied": tie,
    "the memory of another": lambda net: setattr(net.second.weight, "data", net.first.weight.data),
    "the memory of each other": exchange,
    "views": cut,
    "another parameter": lambda net: setattr(
        net.first, "weight", nn.Parameter(torch.ones(BIG, BIG, dtype=torch.float64) / BIG)
    ),
    "weight norm": lambda net: torch.nn.utils.parametrizations.weight_norm(net.first),
    "orthogonal": lambda net: torch.nn.utils.parametrizations.spectral_norm(net.second).eval(),
    "channels": lambda net: setattr(net.scale, "data", net.scale.t()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_are_replaced_are_seen_too(pair: Any, name: str) -> None:
    """By other memory, other tensors, other structure: between two calls, and before the first."""
    model, plain = pair
    same(model, plain)
    for net in (model.module, plain):
        torch.manual_seed(3)
        CHANGES[name](net)
    same(model, plain)
    with torch.no_grad():
        for net in (model.module, plain):
            for p in net.parameters():
                p.mul_(1.25)
    same(model, plain)
    fresh = DataParallel(copy.deepcopy(plain), TWO)
    same(fresh, plain)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state_dict"])
def test_copies_are_ordinary(pair: Any, how: str) -> None:
    """A copy of an exposed module is one of its own."""
    model, plain = pair
    same(model, plain)
    if how == "deepcopy":
        other = copy.deepcopy(model.module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model.module))
    elif how == "save":
        file = io.BytesIO()
        torch.save(model.module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = Net()
        other.load_state_dict(model.module.state_dict())
    assert_same_state(other, plain)
    with torch.no_grad():
        other.first.weight.zero_()
    same(model, plain)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "Adam, one by one": lambda p: torch.optim.Adam(p, 1e-3, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_optimizer_steps_on_exposed_weights(pair: Any, name: str) -> None:
    """Made before the first forward, so that it holds the parameters from before they moved."""
    results = []
    for net in pair:
        optimizer = OPTIMIZERS[name](net.parameters())

        def closure(net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = net(data()).square().mean()
            loss.backward()
            return loss

        results.append([float(optimizer.step(closure)) for _ in range(4)])
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert_same_state(*pair, rtol=1e-6, atol=1e-8)


class Writes(nn.Module):
    """Writes to its weights and to a large buffer, in every chunk."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(BIG, BIG, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(BIG, BIG, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Chunks write different things."""
        if self.how == "buffer":
            self.queue.add_(x.detach().mean())
        elif self.how == "data":
            self.weight.data.add_(x.detach().mean())
        else:
            with torch.no_grad():
                self.weight.add_(x.mean())
        return x @ self.weight + self.queue.mean()


@on_cluster
@pytest.mark.parametrize("how", ["buffer", "data", "no_grad"])
def test_what_chunk_0_writes_reaches_the_master_and_the_rest_stays_private(how: str) -> None:
    """Three forwards, compared with the plain module on chunk 0 alone; no replica keeps what it
    wrote.
    """
    model, plain = DataParallel(Writes(how), TWO), Writes(how)
    for step in range(3):
        x = data(step)
        expected = copy.deepcopy(plain)
        out = model(x)
        torch.testing.assert_close(out[:3], plain(x[:3]))
        torch.testing.assert_close(out[3:], expected(x[3:]))
        assert_same_state(model, plain)


def test_torch_still_sees_weights_that_changed_before_backward(pair: Any) -> None:
    """The replica is told of the version, though nothing is sent."""
    model, _ = pair
    loss = model(data()).sum()
    with torch.no_grad():
        model.module.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_keeps_the_memory_that_a_weight_had(pair: Any) -> None:
    """``p.data = q`` leaves older graphs what they saved, as in one process."""
    model, plain = pair
    for net in (model.module, plain):
        net.zero_grad()
    losses = [net(data()).square().sum() for net in (model, plain)]
    for net in (model.module, plain):
        rebind(net)
    later = [net(data(1)).square().sum() for net in (model, plain)]
    for loss in (*losses, *later):
        loss.backward()
    assert_same_grads(model, plain)


# --- inputs, outputs and gradients, end to end ---


KEPT: list[Tensor] = []


class Marks(nn.Module):
    """Writes to its input, and keeps what it got in a list that is no part of it."""

    def forward(self, x: Tensor) -> Tensor:
        """What the second column of all that came so far says, and the first."""
        KEPT.append(x)
        x[:, 0] = -1
        return torch.cat([torch.cat([kept[:, 1], kept[:, 0]]) for kept in KEPT]).reshape(1, -1)


@on_cluster
def test_a_module_may_write_to_its_input_and_keep_it(executors: Any) -> None:
    """The driver's tensor stays as it was, and what is kept is not overwritten by what
    comes later.
    """
    executor = executors()
    model = DataParallel(Marks(), executor=executor)
    for step in range(5):
        x = torch.full((2, MANY), float(step))
        with torch.no_grad():
            out = model(x)
        assert x.eq(step).all()
        assert (
            out.tolist() == [[number for k in range(step + 1) for number in (float(k), -1.0)]] * 2
        )


@on_cluster
def test_graphs_keep_their_inputs() -> None:
    """Several forwards before the first backward: each saved its own large input."""
    plain = nn.Linear(MANY, 2, bias=False)
    model = DataParallel(copy.deepcopy(plain), TWO)
    xs = [torch.randn(2, MANY, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    for net in (model, plain):
        losses = [net(x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
    assert_same_grads(model, plain, rtol=1e-4, atol=1e-3)


@on_cluster
def test_outputs_and_gradients_are_the_user_s(executors: Any) -> None:
    """They may be written to and kept, more of them than are left where they lie; then all is given
    back.
    """
    executor = executors()
    gc.collect()
    executor.flush()
    lent = [len(slot.client.memory.ledger) for slot in executor.slots(TWO)]
    model = DataParallel(nn.Identity(), ["cpu"], executor=executor)
    outs = []
    for step in range(80):
        out = model(torch.full((1, MANY), float(step), requires_grad=True))
        outs.append(out.detach())
    for out in outs:
        out.add_(1)
    assert [float(out.mean()) for out in outs] == [step + 1.0 for step in range(80)]
    del out
    outs.clear()
    model(torch.zeros(1, MANY))
    executor.flush()
    slots = zip(executor.slots(TWO), lent, strict=True)
    assert all(len(slot.client.memory.ledger) <= before + 1 for slot, before in slots)


def test_gradients_are_kept_across_steps(pair: Any) -> None:
    """A gradient that a program holds is not overwritten by the next step's."""
    kept: list[list[Tensor]] = [[], []]
    for step in range(4):
        for net, row in zip(pair, kept, strict=True):
            net.zero_grad(set_to_none=True)
            net(data(step)).square().sum().backward()
            row.append(
                next(p for name, p in net.named_parameters() if name.endswith("first.weight")).grad
            )
    for one, other in zip(*kept, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(kept[0][0], kept[0][1])


def test_saving_a_gradient_saves_that_alone(pair: Any) -> None:
    """Each has a storage of its own, though they came in one packet."""
    model, _ = pair
    model(data()).sum().backward()
    file = io.BytesIO()
    torch.save(model.module.first.weight.grad, file)
    assert file.tell() < 1.5 * 8 * BIG * BIG


@on_cluster
@pytest.mark.parametrize("second", [False, True])
def test_large_outputs_are_gathered_with_their_gradients(second: bool) -> None:
    """To the second order too."""
    plain = nn.Conv1d(1, 4, 3)
    model = DataParallel(copy.deepcopy(plain), TWO)
    found = []
    for net in (model, plain):
        x = torch.randn(4, 1, 1 << 15, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = net(x)
        (grad,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=second)
        found.append([out.detach(), grad.detach()])
        if second:
            grad.square().sum().backward()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert_same_grads(model, plain, rtol=1e-3, atol=1e-3)


# --- links, fallbacks, leftovers ---


def trained(executor: Executor) -> tuple[dict[str, Tensor], str]:
    """The weights after some steps, and the link in use."""
    torch.manual_seed(2)
    model = DataParallel(Net(), executor=executor)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
    return model.module.state_dict(), executor.stats().link


@pytest.mark.long
@on_cluster
def test_training_is_the_same_by_every_link(executors: Any) -> None:
    """To the bit."""
    reference, name = trained(executors())
    assert name == "shared"
    for link in ("shared", "inline", "object_store"):
        found, _ = trained(executors(link=link))
        assert all(torch.equal(found[key], reference[key]) for key in reference), link


@pytest.mark.long
@on_cluster
def test_replicas_that_cannot_share_get_copies_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container of its own; with ``link="shared"`` it is an error."""
    monkeypatch.setattr(cluster.client, "shows", lambda *_: False)
    plain = Net()
    with caplog.at_level(logging.WARNING, logger="raydp_parallel"), Executor(TWO) as executor:
        model = DataParallel(copy.deepcopy(plain), executor=executor)
        same(model, plain)
        with torch.no_grad():
            model.module.first.weight.mul_(2), plain.first.weight.mul_(2)
        same(model, plain)
        assert not model.module.first.weight.is_shared()
    assert sum("cannot share memory" in record.message for record in caplog.records) == 1
    with pytest.raises(PlacementError, match="cannot share memory"):
        Executor(TWO, options=Options(link="shared"))


@pytest.mark.long
@on_cluster
def test_memory_is_shared_where_each_call_is_a_task(executors: Any) -> None:
    """Its descriptors travel in the calls, and the word which of them are used no more; nothing is
    lent for ever.
    """
    plain = Net()
    executor = executors(link="shared", direct_line=False)
    model = DataParallel(copy.deepcopy(plain), executor=executor)
    for _ in range(6):
        same(model, plain)
    assert model.module.first.weight.is_shared()
    gc.collect()
    same(model, plain)
    assert all(slot.client.line is None and slot.client.shares for slot in executor.slots(TWO))
    assert max(len(slot.client.memory.ledger) for slot in executor.slots(TWO)) <= 2


@pytest.mark.long
@on_cluster
def test_an_exposed_module_moves_to_replicas_that_cannot_see_it() -> None:
    """When a replica joins that needs copies, what was exposed is sent from then on."""
    plain = Net()
    with Executor(TWO) as executor:
        model = DataParallel(copy.deepcopy(plain), executor=executor)
        same(model, plain)
        executor.link.withdraw()
        assert sent(model, lambda: same(model, plain)) >= 3 * 8 * BIG * BIG
        model.module.first.weight.data.mul_(2)
        plain.first.weight.data.mul_(2)
        same(model, plain)


def memory_files() -> int:
    """How many files of anonymous or shared memory this process holds open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found += "memfd:raydp_parallel" in target or "/torch_" in target
    return found


@pytest.fixture
def tidy(cluster: None) -> Iterator[None]:
    """No file of memory more than before."""
    gc.collect()
    before = memory_files()
    yield
    deadline = time.monotonic() + 20
    while True:  # a thread that was starting a successor may be on its way out
        gc.collect()
        if memory_files() <= before:
            return
        assert time.monotonic() < deadline, memory_files() - before


@pytest.mark.long
def test_nothing_is_left_of_an_executor(tidy: None) -> None:
    """Neither of its segments nor of its models'."""
    with Executor(TWO) as executor:
        model = DataParallel(Net(), executor=executor)
        model(data()).sum().backward()
        DataParallel(nn.Identity(), executor=executor)(torch.zeros(4, MANY))
        assert memory_files() > 0
        del model


@pytest.mark.long
def test_nothing_is_left_of_a_replica_that_is_killed(tidy: None) -> None:
    """What was lent to it is free again."""
    with Executor(TWO) as executor:
        model = DataParallel(Net(), executor=executor)
        for _ in range(2):
            model(data()).sum().backward()
            alive = next(replica for replica in executor.replicas() if replica.state == "ready")
            os.kill(alive.pid, signal.SIGKILL)
        model(data()).sum().backward()
        del model


def private(pid: int) -> int:
    """Bytes that a process does not share."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        rows = {line.split(":")[0]: line.split() for line in file}
    return sum(int(rows[name][1]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


@on_cluster
def test_a_replica_holds_no_copy_of_the_weights(executors: Any) -> None:
    """64 MB of them, used in forward and backward."""
    executor = executors()
    small = DataParallel(nn.Linear(8, 8), executor=executor)
    small(torch.zeros(2, 8)).sum().backward()
    before = [private(replica.pid) for replica in executor.replicas()]
    model = DataParallel(nn.Linear(4096, 4096, bias=False), executor=executor)
    with torch.no_grad():
        model(torch.zeros(2, 4096))
    after = [private(replica.pid) for replica in executor.replicas()]
    assert all(b - a < 16 << 20 for a, b in zip(before, after, strict=True))
