"""What the package does on a GPU, on a fake one: the order of copies, events and waits, and the
results.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import inspect
import os
import pickle
import sys
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from fake_gpu import UUID, FakeGpu, installed
from torch import Tensor, nn
from torch.multiprocessing import reductions

import raydp_parallel
from raydp_parallel import cluster, devices
from raydp_parallel.batch import scatter_gather
from raydp_parallel.calls import executor
from raydp_parallel.check import training
from raydp_parallel.cluster import backend, in_process
from raydp_parallel.cluster.ray_backend import DriverMemory, meet_on_device
from raydp_parallel.devices import comparison, cuda, process, ranges
from raydp_parallel.devices.buffers import Arena, Descriptor, LeaseTable
from raydp_parallel.devices.ranges import MemoryRange, ReplicaHello
from raydp_parallel.monitoring import accounts
from raydp_parallel.options import Options
from raydp_parallel.replica import actor
from raydp_parallel.replica.replica import Replica
from raydp_parallel.replica.server import ReplicaServer
from raydp_parallel.state import block_layout
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec, cuda_ipc
from raydp_parallel.transport.links import (
    Attachments,
    InlineLink,
    Mappings,
    ObjectStoreLink,
    link_for,
    shared_link,
)
from raydp_parallel.transport.message_bytes import give_back, pack, take_back, unpack
from raydp_parallel.transport.messages import BackwardRequest, Reply

CPU = torch.device("cpu")
SECOND = torch.device("cpu", 1)
IN_PROCESS = Options(in_process=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU, and no replicas that have never seen one."""
    monkeypatch.setattr(cuda, "_registry", cuda._Registry())
    cuda._registry._tried = True  # with success
    executor.shared(IN_PROCESS).close()
    with installed(monkeypatch) as found:
        yield found
    executor.shared(IN_PROCESS).close()


def host(size: int) -> Tensor:
    """Memory of the host with nothing of interest in it."""
    return torch.full((size,), 9, dtype=torch.uint8)


# --- copies ---


def test_a_gpus_bytes_are_copied_where_they_are_wanted(fake: FakeGpu) -> None:
    """Into pinned memory at once, into other memory by a pinned buffer; there only after
    the wait.
    """
    source, pinned, plain = torch.arange(6, dtype=torch.float32).view(2, 3), host(24), host(24)
    fake.pinned[pinned.data_ptr()] = 24
    piece = devices.piece(source)
    assert (piece.address, piece.size) == (0, 24)
    assert piece.origin is not None
    for target in (pinned, plain):
        piece.origin.copy_to(target.data_ptr())
        assert target.tolist() == [9] * 24
    piece.origin.wait()
    assert pinned.view(torch.float32).tolist() == [*range(6)]
    assert plain.tolist() == [9] * 24
    piece.origin.settle()
    assert plain.view(torch.float32).tolist() == [*range(6)]
    assert fake.log == ["copy to the host", "pinned buffer", "copy to the host", "record", "wait"]


@pytest.mark.parametrize(
    "make", [InlineLink, ObjectStoreLink, lambda: shared_link(Arena(), False, True)]
)
def test_every_link_takes_a_gpus_bytes(fake: FakeGpu, make: Any) -> None:
    """With the machine's own among them, in one message with one wait."""
    link, tensors = make(), [torch.arange(5.0), torch.empty(0), torch.arange(3, dtype=torch.int16)]
    pieces = [devices.piece(t) for t in tensors]
    near = torch.tensor([1, 2, 3], dtype=torch.uint8)
    packet = link.send([*pieces, MemoryRange(near.data_ptr(), 3, near)], [0, 64, 64, 128], 192)
    found = link.open(packet)
    data = ctypes.string_at(found.address, found.size)
    assert np.frombuffer(data[:20], np.float32).tolist() == [0, 1, 2, 3, 4]
    assert np.frombuffer(data[64:70], np.int16).tolist() == [0, 1, 2]
    assert data[128:131] == b"\1\2\3"
    assert fake.log.count("wait") == 1


COPIES = [
    lambda source: cuda.upload(source, CPU),
    lambda source: cuda.load_all([host(64)], [source]),
]


@pytest.mark.parametrize("begin", COPIES, ids=["upload", "load"])
def test_what_a_copy_reads_is_kept_until_it_has_run(fake: FakeGpu, begin: Any) -> None:
    """The host does not wait for an upload, so its source must not be given back before."""
    cuda.lent.let_go()
    before, owner = len(cuda.lent.kept), Arena().take(64)
    alive = weakref.ref(owner)
    fake.later("some work", lambda: None)  # which the copy is queued behind
    begin(MemoryRange(owner.array.ctypes.data, 64, owner))
    del owner
    gc.collect()
    devices.lent.let_go()
    assert alive() is not None
    assert len(cuda.lent.kept) == before + 1
    devices.finish(CPU)
    devices.lent.let_go()
    gc.collect()
    assert alive() is None
    assert len(cuda.lent.kept) == before


def test_reading_a_gpus_bytes_on_a_cpu(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on a CPU gets a copy."""
    piece = devices.piece(torch.arange(4.0))
    monkeypatch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
    spec = codec.spec_of(torch.empty(4))
    assert devices.reader(piece, CPU)(spec, torch.float32).tolist() == [0, 1, 2, 3]
    (window,) = devices.windows(piece, [spec], [torch.float32], CPU)
    assert window.tolist() == [0, 1, 2, 3]
    assert devices.upload(piece, CPU).view(torch.float32).tolist() == [0, 1, 2, 3]


def test_segments_are_pinned_where_a_gpu_copies(fake: FakeGpu) -> None:
    """When they are made, until they go; a driver that uses no GPU pins nothing; a refusal is no
    error.
    """
    arena = Arena(pin=devices.pinner(CPU))
    lent = arena.take(1000)
    address = lent.array.ctypes.data
    assert fake.pinned == {address: 1 << 16}
    del lent
    arena.close()
    gc.collect()
    assert not fake.pinned
    assert devices.pinner(None)(address, 64) is None  # type: ignore[misc]  # CUDA has not begun here


def test_a_drivers_memory_is_pinned_once_it_uses_cuda(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: it would be started for that. And by a GPU that it uses: another one would lose
    half a gigabyte.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    pin: Any = devices.pinner(None)
    assert pin(4096, 64) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    fake.used = set()
    assert pin(4096, 64) is None
    fake.used = {1, 2}
    unpin = pin(4096, 64)
    assert fake.pinned == {4096: 64}
    fake.used = {0}
    unpin()
    assert not fake.pinned
    assert fake.registering == [1, 1]
    fake.counts = False  # with an allocator of the user's
    assert pin(4096, 64) is None
    devices.pinner(SECOND)(4096, 64)  # type: ignore[misc]
    assert fake.registering == [1, 1, 1]


# --- comparisons ---


def test_bytes_are_compared_where_they_are(fake: FakeGpu) -> None:
    """Small ones together, large ones alone, others of other sizes; one small answer, asked for
    later.
    """
    torch.manual_seed(1)
    large = torch.randint(0, 255, (comparison._LARGE + 5,), dtype=torch.uint8)
    nan = torch.tensor([float("nan"), 1.0])
    cases: list[tuple[Tensor, Tensor, bool]] = [
        (nan, nan.clone(), True),
        (torch.zeros(3), -torch.zeros(3), False),
    ]
    cases += [(torch.zeros(5), torch.zeros(6), False), (torch.zeros(0), torch.zeros(0), True)]
    cases += [
        (large, large.clone(), True),
        (large, large.flip(0), False),
        (torch.ones(3), torch.ones(3), True),
    ]
    answers = devices.compare(
        [(devices.piece(one), devices.piece(other)) for one, other, _ in cases]
    )
    assert "wait" not in fake.log
    assert answers() == [same for _, _, same in cases]
    assert fake.log.count("wait") == 1
    assert answers() == [same for _, _, same in cases]
    assert fake.log.count("wait") == 1


@pytest.mark.parametrize("how", ["runs", "fingerprints"])
def test_what_comparisons_keep_is_used_behind_the_stream_that_copied_it(
    fake: FakeGpu, how: str
) -> None:
    """Calls under other streams of the user's find the offsets of runs there: that stream may not
    have come to their copy, and may free them first.
    """
    comparison._edges.cache_clear()
    comparison._ends.cache_clear()
    one, other, first, side = host(40), host(40), fake.stream(), fake.stream()

    def begin(stream: Any) -> tuple[list[str], list[str]]:
        with fake.on(stream):
            fake.log.clear()
            fake.recorded.clear()
            if how == "runs":
                devices.compare_runs(one, other, [0, 20], [20, 20])
            else:
                devices.prints({1: devices.piece(one), 2: devices.piece(other)})
        waits = [entry for entry in fake.log if entry.startswith("stream waits")]
        return waits, [*fake.recorded]

    assert begin(first) == ([], [])
    waits, recorded = begin(side)
    assert waits == [f"stream waits on {side.name}"] * 2  # for each table, or each factor
    assert recorded == [side.name] * 2
    assert begin(first) == ([], [])


def test_a_copy_stays_on_the_device(fake: FakeGpu) -> None:
    """And is one."""
    tensor = torch.arange(4.0)
    found = devices.copied(devices.piece(tensor))
    tensor.zero_()
    assert found.origin is not None
    assert found.origin.tensor.view(torch.float32).tolist() == [0, 1, 2, 3]


EDITS = {
    "one bit": lambda t: t.view(torch.int32).bitwise_xor_(1),
    "signs": lambda t: t.neg_(),
    "two signs": lambda t: t[:2].neg_(),
    "swapped": lambda t: t.copy_(t.flip(0)),
    "moved": lambda t: t.copy_(t.roll(1)),
    "zeros": lambda t: t.zero_(),
    "doubled": lambda t: t.mul_(2),
    "plus and minus": lambda t: t.view(torch.int32)[:3].add_(
        torch.tensor([1, -2, 1], dtype=torch.int32)
    ),
}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("edit", [*EDITS])
@pytest.mark.parametrize("size", [8, 1001, comparison._LARGE // 4 + 3])
def test_fingerprints_tell_every_edit(edit: str, size: int) -> None:
    """Of that run alone, wherever it stands among others."""
    torch.manual_seed(2)
    tensors = {
        7: torch.randn(3),
        1: torch.randn(size),
        5: torch.randn(11).to(torch.int8),
        2: torch.randn(0),
    }

    def now() -> Any:
        return devices.prints({key: devices.piece(t) for key, t in tensors.items()})

    before = now()
    assert before.unlike(now()) == []
    EDITS[edit](tensors[1])
    assert before.unlike(now()) == [1]


@pytest.mark.usefixtures("fake")
def test_fingerprints_of_some_and_newer_ones() -> None:
    """Newer ones replace older ones of the same runs."""
    one, other = torch.randn(4), torch.randn(5)

    def of(**runs: Tensor) -> Any:
        return devices.prints({int(key[1:]): devices.piece(t) for key, t in runs.items()})

    both = of(a1=one, a2=other)
    one.add_(1)
    assert both.unlike(of(a1=one, a2=other)) == [1]
    joined = both.joined(of(a1=one))
    assert joined.keys == (2, 1)
    assert joined.unlike(of(a2=other, a1=one)) == []
    assert both.of([2]).unlike(of(a2=other)) == []
    assert devices.prints({}).joined(both) == both
    assert both.joined(devices.prints({})) == both
    assert devices.prints({}).unlike(both) == []


# --- the whole way ---


class Flattens(nn.Module):
    """A recurrent net with a forward that gives its weights other memory, with the same values, as
    `flatten_parameters()` does on CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs."""
        weights = [*self.lstm.parameters()]
        flat = torch.cat([p.detach().flatten() for p in weights])
        for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            _assign(p, part.view_as(p))
        out: Tensor = self.head(self.lstm(x)[0])
        return out


_assign: Any = vars(torch._C.TensorBase)["data"].__set__
"""``p.data = ...`` as C++ does it, where no code of Python's sees it."""


@pytest.mark.parametrize("seen", [True, False], ids=["in Python", "in C++"])
@pytest.mark.parametrize("where", ["driver", "replicas"])
@pytest.mark.usefixtures("fake")
def test_weights_that_forward_moves_leave_the_module_as_it_is(
    monkeypatch: pytest.MonkeyPatch, where: str, seen: bool
) -> None:
    """It was built anew in each step; with the optimizer in the replicas it was an error."""
    loads: list[int] = []
    load = ReplicaModule._load
    monkeypatch.setattr(ReplicaModule, "_load", lambda m: loads.append(1) or load(m))
    if seen:
        monkeypatch.setitem(globals(), "_assign", lambda p, data: setattr(p, "data", data))
    torch.manual_seed(0)
    net = Flattens().double()
    plain = copy.deepcopy(net)
    model = wrapped(net, 1)
    ours: Any = torch.optim.SGD(net.parameters(), 0.1)
    if where == "replicas":
        ours = model.optimizer(torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(4):
        x = torch.randn(4, 7, 6, dtype=torch.float64)
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    if where == "replicas":
        model.sync()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert len(loads) <= 2


def test_an_update_is_waited_for_and_copied_once(fake: FakeGpu, ends: Ends) -> None:
    """However many blocks it has: the packet is opened once, its event waited for once, and all is
    one operation.
    """
    ends.link.arenas[CPU] = ends.arena
    ends.link.withdraw()
    mappings = ends.client._mappings
    mappings.opener = opener = cuda_ipc.Opener(CPU)
    asked: list[int] = []
    calls: list[int] = []
    foreach = torch._foreach_copy_
    net = nn.Sequential(*[nn.Linear(150, 130) for _ in range(40)], nn.BatchNorm1d(130))
    tracker, replica_module, held = ModuleTracker(net, ends.link), ReplicaModule(CPU), 0
    for number in range(3):
        tracker.sync()
        update, attachments = tracker.update_from(held), Attachments(ends.link)
        assert update is not None
        held, message = tracker.revision, update.placed(attachments)
        there = Attachments(ends.link, over(attachments.beside, mappings))
        mappings.opener = lambda found: asked.append(1) or opener(found)
        fake.log.clear()
        asked.clear()
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch,
                "_foreach_copy_",
                lambda t, s, **k: calls.append(len(t)) or foreach(t, s, **k),
            )
            replica_module.prepare(message, there, graphs_alive=False)
        for one, other in zip(replica_module.module.parameters(), net.parameters(), strict=True):
            assert torch.equal(one, other)
        assert len(asked) == fake.log.count("stream waits") == len(attachments.beside) <= 2
        if number:
            assert max(calls) == 80 + 2
            assert len(calls) <= 5
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1)


def wrapped(net: nn.Module, chunks: int = 2) -> Any:
    """On replicas in this process, which take the CPU for their GPU."""
    return raydp_parallel.DataParallel(net, ["cpu"] * chunks, options=IN_PROCESS)


@pytest.mark.parametrize(
    "name", ["perceptron, SGD", "residual net with batch norm", "tied transformer, loss inside"]
)
def test_training_is_right_though_copies_take_place_later(fake: FakeGpu, name: str) -> None:
    """A read before the wait would find something else."""
    case = training.CASES[name]
    torch.manual_seed(0)
    net = case.make().double()
    plain = training.train(copy.deepcopy(net), case, 4, CPU)
    assert (
        training.difference(training.train(wrapped(net, 1), case, 4, CPU), plain)
        <= training.TOLERANCE
    )
    assert 0 < fake.log.count("wait") <= fake.log.count("copy to the host")


MIXED = {"driver on the CPU": frozenset({"cpu"}), "replicas on CPUs": frozenset()}


@pytest.mark.parametrize("where", [*MIXED])
@pytest.mark.parametrize(
    "name", ["perceptron, gradient penalty", "residual net with batch norm", "bidirectional LSTM"]
)
def test_training_is_right_where_one_side_has_a_gpu(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """A master copy on the CPU for replicas on GPUs, and the other way round."""
    outside, inside = MIXED[where], frozenset({"cpu"}) - MIXED[where]
    isolated = in_process._isolated

    @contextlib.contextmanager
    def replicas() -> Iterator[None]:
        with isolated(), monkeypatch.context() as patch:
            patch.setattr(devices.ranges, "HOST", inside)
            yield

    monkeypatch.setattr(devices.ranges, "HOST", outside)
    monkeypatch.setattr(in_process, "_isolated", replicas)
    case = training.CASES[name]
    torch.manual_seed(0)
    net = case.make().double()
    plain = training.train(copy.deepcopy(net), case, 4, CPU)
    assert (
        training.difference(training.train(wrapped(net, 1), case, 4, CPU), plain)
        <= training.TOLERANCE
    )
    assert "copy to the host" in fake.log


class Writes(nn.Module):
    """Writes to a buffer without a version, to a parameter with one, and rebinds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1)
        self.seen.data.add_(x.sum(0))
        return self.norm(x) * self.weight.detach()


@pytest.mark.usefixtures("fake")
def test_what_chunk_0_writes_comes_back_once() -> None:
    """And what the others write does not."""
    net = Writes()
    plain = copy.deepcopy(net)
    x = torch.randn(6, 3)
    model = wrapped(net)
    for _ in range(3):
        model(x)
        plain(x[:3])
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


class Sometimes(nn.Module):
    """Writes to buffers without a version, by the sign of its input to one, two or none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, writes in ((self.one, x[0, 0] > 0), (self.other, x[0, 1] > 0)):
            x = norm.train(bool(writes))(x)
        return x


@pytest.mark.usefixtures("fake")
def test_a_guess_of_what_is_written_may_be_wrong() -> None:
    """What the last forward wrote to is sent before it is known whether this one did."""
    net, random = Sometimes(), torch.Generator().manual_seed(1)
    plain, model = copy.deepcopy(net), wrapped(net, 1)
    for signs in ((1, 1), (1, 1), (-1, -1), (1, -1), (1, -1), (-1, 1), (1, 1), (-1, -1), (-1, -1)):
        x = torch.rand(6, 3, generator=random)
        x[0, :2] *= torch.tensor(signs)
        torch.testing.assert_close(model(x), plain(x))
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name])


@pytest.mark.usefixtures("fake")
def test_buffers_of_a_large_net_come_right() -> None:
    """Where all of the state is too much to be held twice, only what is compared after each forward
    is.
    """
    net = nn.Sequential(nn.Linear(1200, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 2)).double()
    assert sum(t.nbytes for t in net.state_dict().values()) > devices.memory.SMALL
    plain, x = copy.deepcopy(net), torch.randn(6, 1200).double()
    model = wrapped(net, 1)
    # their graphs keep what they saw: blocks get other memory
    outs = [model(x * scale).sum() for scale in (1, 2, 3)]
    theirs = [plain(x * scale).sum() for scale in (1, 2, 3)]
    for ours, expected in zip(outs, theirs, strict=True):
        ours.backward()
        expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


@pytest.mark.usefixtures("fake")
def test_an_edit_without_a_version_is_found_on_the_device() -> None:
    """Of a CUDA master copy, by fingerprints; the forward is run again."""
    net = nn.Sequential(nn.Linear(2000, 600), nn.Linear(600, 2))  # over `devices.memory.SMALL`
    model, x = wrapped(net), torch.randn(4, 2000)
    with torch.no_grad():
        model(x)
        for edit in (lambda w: w.data.mul_(2), lambda w: w.detach().numpy().__setitem__((0, 0), 5)):
            edit(net[0].weight)
            torch.testing.assert_close(model(x), net(x))
    assert model.executor.stats().reruns == 2


@pytest.mark.usefixtures("fake")
def test_training_takes_no_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step changes all weights. They are taken of what was sent once contents are
    looked at.
    """
    net = nn.Sequential(nn.Linear(2000, 600), nn.Linear(600, 2))
    model, x = wrapped(net), torch.randn(4, 2000)
    taken: list[int] = []
    of = comparison._print
    monkeypatch.setattr(comparison, "_print", lambda group: taken.append(len(group)) or of(group))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
    assert not taken
    with torch.no_grad():
        model(x)
        model(x)
        assert taken
        net[1].bias.data.add_(1)
        torch.testing.assert_close(model(x), net(x))
        optimizer.step()
        net[0].weight.data.mul_(2)
        torch.testing.assert_close(model(x), net(x))
    assert model.executor.stats().reruns == 1


def test_what_was_sent_comes_back_a_few_blocks_at_a_time(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To have fingerprints made of it: so many bytes, whatever the blocks and their sizes are."""
    most = comparison._LARGE
    monkeypatch.setattr(comparison, "_AT_ONCE", most)
    sizes = (1000, 2 * most + 7, most // 2, most // 4, 70001, most)
    net = nn.ParameterList(torch.randn(-(-size // 4)) for size in sizes)
    tracker = ModuleTracker(net, shared_link(Arena(), True, False))
    tracker.sync()
    contents = tracker._contents
    fake.brought = [0, 0]
    assert contents.edited(set()) == []
    assert most <= fake.brought[1] <= most + 4096  # and a small index
    assert fake.brought[0] <= 4096
    as_sent = devices.prints(
        {b: contents.master.read(b) for b in dict.fromkeys(contents._prints.known.keys)}
    )
    assert contents._prints.known.keys == as_sent.keys
    assert not contents._prints.known.unlike(as_sent)
    for number in (1, 5):
        net[number].data[-1] += 1
    edited = [contents.master.layout.specs[number].block for number in (1, 5)]
    assert sorted(contents.edited(set())) == sorted(edited)


class Flat(nn.Module):
    """A recurrent net with weights that are one run of memory, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        flat, at = torch.cat([p.detach().flatten() for p in self.lstm.parameters()]), 0
        for parameter in self.lstm.parameters():
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Says whether it still is one."""
        first, *others = self.lstm.parameters()
        assert {p.untyped_storage().data_ptr() for p in others} == {
            first.untyped_storage().data_ptr()
        }
        out: Tensor = self.lstm(x)[0]
        return out


def test_the_weights_of_a_recurrent_net_stay_one_run(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which cuDNN would copy in each call otherwise; on a CPU each is sent by itself."""
    net, plain, x = Flat(), Flat(), torch.randn(4, 7, 6)
    plain.load_state_dict(net.state_dict())
    tensors = dict(enumerate(net.parameters()))
    assert [*block_layout.lay_out(tensors).members.values()] == [tuple(range(16))]
    model = wrapped(net, 1)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    monkeypatch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
    assert len(block_layout.lay_out(tensors).members) == 16


def test_a_replica_has_the_drivers_variables_before_it_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA and its libraries read them as they start, and its node may have others."""
    made: Any = actor.ReplicaActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    seen: list[str] = []
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [3]})

    def take(kind: str, ids: Any) -> str:
        seen.append(f"{kind} {ids} {os.environ['NVIDIA_TF32_OVERRIDE']}")
        return "cpu"

    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(devices, "take_given", take)
    for module, name in ((devices, "keep_freed_memory"), (process, "belong_to_replica")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    made("gpu", "inline", 0, {"NVIDIA_TF32_OVERRIDE": "0"}, "secret", paths=("host",))
    assert seen == ["gpu ['3'] 0"]


def test_an_answer_waits_for_what_was_sent_last(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module wrote to is sent behind the first wait, if it is not what was guessed. With the
    answer memory is given back that the GPU reads for that.
    """
    replica, arena = Replica(CPU), cuda_ipc.DeviceArena(CPU)
    back = Attachments(cuda_ipc.DeviceLink(ObjectStoreLink(), arena))
    left: list[int] = []

    def written(*_: Any) -> tuple[None, int]:
        x = torch.randn(30000)
        back.link.send([devices.piece(x)], [0], x.nbytes)
        left.append(fake.default.asked - fake.default.done)
        return None, 7

    monkeypatch.setattr(replica, "_written", written)
    for name in ("_refuse_writes", "_guessed", "_show_the_present", "_hooked"):
        monkeypatch.setattr(replica, name, lambda *_: None)
    replica._laps.begin(1)
    replica._laps.begin(2)
    replica._laps.begin(3)
    reply = replica._answer(None, back, lambda: None, SimpleNamespace(model=0))  # type: ignore[arg-type,return-value]
    left.append(fake.default.asked - fake.default.done)
    assert reply.failure is None
    assert reply.revision == 7
    assert left[0] > 0
    assert left[1] == 0


def test_times_are_the_devices(fake: FakeGpu) -> None:
    """Forward lasts until the device's mark, though the host went on before."""
    watch = devices.Stopwatch(CPU)
    assert watch.finish() is None
    began = time.perf_counter()
    watch.mark()
    passed = watch.finish()
    assert passed is not None
    assert began - 1e-6 <= passed <= time.perf_counter()  # a difference is rounded
    assert watch.finish() is None
    model = wrapped(nn.Linear(3, 2))
    model(torch.ones(4, 3)).sum().backward()
    for replica in model.stats().replicas:
        assert replica.phases.forward > 0
        assert replica.phases.copy_out >= 0
        assert (replica.memory, replica.memory_peak) == (5, 7)


@pytest.mark.usefixtures("fake")
def test_a_gpu_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its uuid; and without an index it is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.output_place("cuda") == devices.output_place(3) == torch.device("cuda", 3)
    assert backend.device_id("cuda") == 3
    assert (devices.own("gpu"), devices.own("cpu")) == ("cuda:0", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (devices.own("gpu"), backend.device_id("cuda")) == ("cpu", 0)
    assert devices.describe(CPU, 1, "node") == ReplicaHello(
        1, "node", "cpu", "Fake", UUID, 1000, 10
    )


def test_what_users_and_the_dashboard_read_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output devices as indices, as upstream; replicas with the GPU that Ray gave them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = raydp_parallel.DataParallel(
        nn.Linear(3, 2), ["cpu", "cpu"], output_device=1, options=IN_PROCESS
    )
    assert model.output_device == 1
    made: Any = actor.ReplicaActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "_gpu", lambda _self: "MIG-5")
    monkeypatch.setattr(made, "_node", lambda _self: "0123456789")
    # Not the module's names: if `ray.get_actor` was ever called here, the class holds what came
    # back from the cluster.
    ending = inspect.unwrap(made._end).__globals__
    client = object.__new__(made)
    client._rank, client._device = 3, torch.device("cuda", 0)
    assert repr(client) == "Replica(3@cuda:0 = GPU MIG-5, node 01234567)"
    client._device = CPU
    assert repr(client) == "Replica(3@cpu, node 01234567)"
    ended: list[int] = []
    monkeypatch.setitem(ending, "os", SimpleNamespace(_exit=ended.append))
    client._end()
    assert ended == [1]


def test_large_outputs_on_a_gpu_are_joined_there(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in the memory that a CPU uses again and again."""
    parts = [torch.randn(1 << 17).requires_grad_() for _ in range(2)]
    joined = scatter_gather.join_along(parts, 0)
    assert joined.grad_fn is not None
    assert joined.grad_fn.name() == "CatBackward0"
    monkeypatch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
    assert scatter_gather.join_along(parts, 0).grad_fn.name() == "GatherBackward"  # type: ignore[union-attr]


def test_a_replica_whose_gpu_is_spoiled_ends_with_the_next_call(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses to work in a process after an illegal access. The error is told first; other
    errors end no process.
    """
    ended: list[str] = []
    monkeypatch.setattr(ReplicaServer, "_end", lambda _client: ended.append("ended"))
    client = ReplicaServer("cpu", InlineLink())

    def call() -> Any:
        return unpack(client.forget(b"", pack(None))[1])

    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(client._replica, "forget", broken)
        assert "illegal memory access" in call().failure.text
        assert call().failure is not None  # the device still answers: something else was wrong
        assert not ended
        fake.fail_later()
        assert call().failure is not None
        assert not ended
    call()
    assert ended == ["ended"]


def test_an_error_of_a_kernel_is_raised_as_the_modules(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host hears of it when it waits for the device, and the driver in upstream's words."""
    ended: list[str] = []
    monkeypatch.setattr(ReplicaServer, "_end", lambda _client: ended.append("ended"))
    model = wrapped(nn.Linear(3, 2))

    def assertion(*_: object) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr(cuda.Stopwatch, "finish", assertion)
        patch.setattr(cuda, "finish", assertion)
        with pytest.raises(
            RuntimeError,
            match=r"(?s)Caught RuntimeError in replica "
            r"0.*device-side assert triggered",
        ):
            model(torch.ones(4, 3))
    assert model(torch.ones(4, 3)).shape == (4, 2)
    assert ended == ["ended"] * 2


# --- between processes on one GPU ---


class Ends:
    """The driver's end and a replica's, in one process."""

    def __init__(self) -> None:
        self.client = ReplicaServer("cpu", link_for("auto"))
        self.client.start_sharing(False)
        self.arena = cuda_ipc.DeviceArena(CPU)
        self.link = cuda_ipc.DeviceLink(shared_link(Arena(), True, False))
        actor = SimpleNamespace(
            **{
                name: SimpleNamespace(remote=getattr(self.client, name))
                for name in ("share_device", "start_device")
            }
        )
        self.remote = cluster.ReplicaClient(actor)


@pytest.fixture
def ends(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Both ends."""
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    monkeypatch.setattr(cuda_ipc, "_told", set())
    return Ends()


def over(packets: list[Any], mappings: Mappings) -> list[Any]:
    """What the other process gets of packets that lie beside a message."""
    return [
        mappings.find(Descriptor(*pickle.loads(pickle.dumps(tuple(p.descriptor))))) for p in packets
    ]


def test_tensors_go_by_the_gpus_memory(fake: FakeGpu, ends: Ends) -> None:
    """Behind the sender's event; the segment is the sender's again once the copy has run, and is
    opened once.
    """
    assert ends.remote.memory.share_device(ends.arena) == ""
    ends.link.arenas[CPU] = ends.arena
    assert ends.link.name == "shared and CUDA IPC"
    ledger = LeaseTable()
    for number in range(3):
        x = torch.full((200, 300), float(number))
        attachments = Attachments(ends.link)
        fake.log.clear()
        parcel, _ = codec.encode((x, x.t()), attachments, "inputs")
        # behind the copy before and this one; a new segment has to have an event to share
        assert fake.log == ["record"] * (not number) + ["stream waits", "record"]
        assert all(isinstance(packet, cuda_ipc.DeviceBuffer) for packet in attachments.beside)
        for packet in attachments.beside:
            ledger.lend(packet)
        fake.log.clear()
        there = ends.client._mappings
        found = codec.unpack(
            parcel, Attachments(ends.client._link, over(attachments.beside, there)), CPU
        )
        assert fake.log[0] == "stream waits"
        assert "copy to the host" not in fake.log
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], x.t())
        del attachments, packet
        gc.collect()
        devices.finish(CPU)
        take_back(give_back(there), ledger)
        assert len(ledger) == 0
    assert len(fake.opened) == 2 + 1  # each side's sample, and one segment for all three
    assert sum(ends.arena.idle().values()) == 1  # the sample is lent still


@pytest.mark.parametrize("way", ["host", "ipc"])
def test_many_tensors_are_one_copy(fake: FakeGpu, ends: Ends, way: str) -> None:
    """For each dtype, for torch copies each by itself where they are mixed; and one buffer."""
    images = torch.randn(20, 2, 3, 4, 5).unbind()
    tensors = [image.contiguous(memory_format=torch.channels_last) for image in images]
    tensors += [torch.randn(3, 4, dtype=torch.float16), torch.arange(5), torch.randn(6, 7)]
    if way == "ipc":
        assert ends.remote.memory.share_device(ends.arena) == ""
        ends.link.arenas[CPU] = ends.arena
    attachments = Attachments(ends.link)
    fake.log.clear()
    parcel, _ = codec.encode(tuple(tensors), attachments, "gradients")
    if way == "ipc":
        assert fake.log == ["record", "stream waits", "record"]
    else:
        assert fake.log == ["pinned buffer", *["copy to the host"] * 3, "record", "wait"]
    found = codec.unpack(
        parcel,
        Attachments(ends.client._link, over(attachments.beside, ends.client._mappings)),
        CPU,
    )
    for one, other in zip(found, tensors, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert not one._is_view()
    before = found[1]._version
    found[0].add_(1)
    assert found[1]._version == before


def test_answers_come_by_the_gpus_memory(ends: Ends) -> None:
    """What the replica sends, also if it is small; what lies elsewhere goes as ever."""
    assert ends.remote.memory.share_device(ends.arena) == ""
    answer = Attachments(ends.client._link)
    parcel, _ = codec.encode((torch.arange(90000.0),), answer, "output")
    found = codec.unpack(
        parcel, Attachments(ends.link, over(answer.beside, ends.remote.memory.mappings)), CPU
    )
    assert torch.equal(found[0], torch.arange(90000.0))
    ends.link.arenas[CPU] = ends.arena
    small = ends.link.send([devices.piece(torch.ones(2))], [0], 8)
    assert isinstance(small, cuda_ipc.DeviceBuffer)
    assert isinstance(ends.link.send([], [], 0), bytes)
    near = torch.ones(90000)
    assert not isinstance(
        ends.link.send([MemoryRange(near.data_ptr(), near.nbytes, near)], [0], near.nbytes),
        cuda_ipc.DeviceBuffer,
    )


def test_what_is_wanted_on_the_host_takes_no_detour(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the outputs and gradients of a master copy on the CPU, with a driver that uses that GPU
    for something else.
    """
    assert ends.remote.memory.share_device(ends.arena) == ""

    def forward(_request: Any, _attachments: Attachments, back: Attachments) -> Reply:
        return Reply(
            codec.encode(torch.arange(90000.0), back, "output")[0],
            None,
            (),
            None,
            0.0,
            1,
            back.size,
        )

    monkeypatch.setattr(ends.client._replica, "forward", forward)
    for by_host in (False, True):
        request = BackwardRequest(*[None] * 13, by_host=by_host)  # type: ignore[arg-type]
        _, packet = ends.client._answer(forward, pack(request), ())
        assert isinstance(packet, cuda_ipc.DeviceBuffer) != by_host


@pytest.mark.parametrize("where", [*MIXED])
def test_requests_say_where_their_answers_are_wanted(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Forward and backward, by where the module is."""
    seen: list[bool] = []
    for name in ("forward", "backward"):
        method = getattr(Replica, name)

        def noted(replica: Any, request: Any, *more: Any, method: Any = method) -> Any:
            seen.append(request.by_host)
            return method(replica, request, *more)

        monkeypatch.setattr(Replica, name, noted)
    monkeypatch.setattr(devices.ranges, "HOST", MIXED[where])
    wrapped(nn.Linear(3, 2), 1)(torch.ones(4, 3)).sum().backward()
    assert seen == [where == "driver on the CPU"] * 2


def test_bytes_are_counted_and_not_read(fake: FakeGpu, ends: Ends) -> None:
    """What went by a GPU's memory was copied to the host in each step, to see how long it was."""
    ends.link.arenas[CPU] = ends.arena
    x = torch.randn(30000)
    lent = ends.link.send([devices.piece(x)], [0], x.nbytes)
    ends.remote.memory.arena, ends.remote.memory.shares = ends.arena, True
    fake.log.clear()
    for packet in (lent, *ends.remote.memory.within_reach([lent])):
        assert accounts.ways([packet], x.nbytes) == (("shared", x.nbytes),)
    assert not fake.log


def test_who_cannot_open_it_gets_a_copy(fake: FakeGpu, ends: Ends) -> None:
    """Through memory of the host, which all of them share: copied once."""
    ends.link.arenas[CPU] = ends.arena
    x = torch.randn(30000)
    lent = ends.link.send([devices.piece(x)], [0], x.nbytes)
    sent: list[Any] = []
    line = SimpleNamespace(intact=True, send=lambda _number, parts: sent.append(parts[3]))
    for _ in range(2):
        ends.remote.line, ends.remote.memory.shares = line, True  # type: ignore[assignment]
        ends.remote.submit("forward", b"", [lent])
    assert fake.log.count("copy to the host") == 1
    assert sent[0] is sent[1]
    assert np.array_equal(sent[0].array[: x.nbytes].view(np.float32), x.numpy())
    assert len(ends.remote.memory.ledger) == 1
    carried: list[Any] = []  # by Ray, which carries the descriptor
    ends.remote.actor.forward = SimpleNamespace(
        remote=lambda _word, _header, *beside: carried.extend(beside)
    )
    ends.remote.line = None
    ends.remote.submit("forward", b"", [lent])
    assert carried == [sent[0].descriptor]
    ends.remote.memory.shares = False
    ends.remote.submit("forward", b"", [lent])
    assert np.array_equal(carried[1].view(np.float32), x.numpy())
    with pytest.raises(OSError, match="has not agreed to open any"):
        over([lent], Mappings())[0].piece()


@pytest.mark.parametrize("way", ["host", "ipc", "peer"])
def test_new_weights_leave_the_masters_gpu_once(fake: FakeGpu, ends: Ends, way: str) -> None:
    """However many replicas there are on other GPUs of the machine: each copies them from the same
    memory of the host to its own. The one on the master's GPU reads them there, with ``ipc``; with
    ``peer`` those on another one read what was copied from GPU to GPU.
    """
    there_too = cuda_ipc.DeviceArena(SECOND)
    if way != "host":
        ends.link.arenas[CPU] = ends.arena
    if way == "peer":
        ends.link.arenas[SECOND] = there_too
        there_too.peers.add(CPU)
    net = nn.Linear(300, 200)
    tracker, clients, there = ModuleTracker(net, ends.link), list[Any](), list[Mappings]()
    for place in (CPU, SECOND, SECOND):
        clients.append(cluster.ReplicaClient(None))
        memory = clients[-1].memory
        memory.shares = True
        if way != "host":
            memory.arena = ends.arena if place == CPU else there_too
        there.append(Mappings())
        there[-1].opener = cuda_ipc.Opener(CPU)
    ends.link.withdraw()  # as for every replica on a GPU
    for number in range(3):
        fake.log.clear()
        tracker.sync()
        sent, opened = list[Any](), list[bool]()
        for client, mappings in zip(clients, there, strict=True):
            update, attachments = tracker.update_from(tracker.revision - 1), Attachments(ends.link)
            assert update is not None
            (blob,) = update.placed(attachments).blobs
            (near,) = client.memory.within_reach(attachments.beside)
            sent.append(near)
            opened.append(bool(near.descriptor.device))
            whole = over([near], mappings)[0].piece()
            for offset, size in zip(blob.offsets, blob.sizes, strict=True):
                found = ranges.data_of(whole.part(offset, size)).view(torch.float32)
                assert any(torch.equal(found, p.flatten()) for p in net.parameters())
        assert fake.log.count("copy to the host") == (way != "peer"), number
        assert opened == [way != "host", way == "peer", way == "peer"]
        if way == "peer":  # the same memory, by a handle for each process
            assert sent[1].descriptor.token == sent[2].descriptor.token != sent[0].descriptor.token
        else:
            assert sent[1] is sent[2]
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1)


def test_own_packets_are_compared_and_opened_in_place(ends: Ends) -> None:
    """The driver looks at what it sent."""
    ends.link.arenas[CPU] = ends.arena
    x = torch.randn(30000)
    packet = ends.link.send([devices.piece(x)], [0], x.nbytes)
    assert devices.compare([(ends.link.open(packet), devices.piece(x))])() == [True]
    assert ends.link.take(packet) is None
    assert ends.link.show(packet, 0, 10) is None
    assert (
        not ends.link.exposes
        or ends.link.expose(torch.zeros(2).untyped_storage(), lambda: 1) is None
    )
    ends.link.withdraw()
    assert not ends.link.exposes
    small = ends.link.send([devices.piece(torch.ones(2))], [0], 8)
    assert ends.link.open(small).size == 8
    assert ends.link.take(small) is None
    assert ends.link.show(small, 0, 8) is None
    ends.link.close()
    cuda_ipc.DeviceLink(shared_link(Arena(), True, False)).close()


def test_messages_to_other_gpus_do_not_take_this_ones_memory(ends: Ends) -> None:
    """What one replica alone gets goes by the link that it can read; what all get is sent once."""
    ours: Any = SimpleNamespace(link=ends.link, _device_link=ends.link)
    ends.link.arenas[CPU] = ends.arena
    assert DriverMemory.link_to(ours, ends.remote) is ends.link.near
    ends.remote.memory.arena = ends.arena
    assert DriverMemory.link_to(ours, ends.remote) is ends.link
    ours.link, ours._device_link = ends.link.near, None
    assert DriverMemory.link_to(ours, ends.remote) is ours.link


def test_each_gpu_of_the_drivers_has_memory_to_share(fake: FakeGpu, ends: Ends) -> None:
    """What lies on one goes by its memory to all that can open that; to a replica that is on
    another GPU alone, by the host.
    """
    ends.link.arenas = {CPU: ends.arena, SECOND: cuda_ipc.DeviceArena(SECOND)}
    here, there = torch.randn(30000), fake.put(torch.randn(30000), 1)
    ours: Any = SimpleNamespace(link=ends.link, _device_link=ends.link)
    links: dict[Any, Any] = {None: ends.link}
    ends.remote.memory.shares = True
    for device in (CPU, SECOND):
        ends.remote.memory.arena = ends.link.arenas[device]
        links[device] = DriverMemory.link_to(ours, ends.remote)
    for place, link in links.items():
        for x in (here, there):
            packet = link.send([devices.piece(x)], [0], x.nbytes)
            assert isinstance(packet, cuda_ipc.DeviceBuffer) == (place in (None, x.device))
            if place is None:
                assert packet.device == x.device
                ends.remote.memory.arena = ends.link.arenas[x.device]
                (near,) = ends.remote.memory.within_reach([packet])
                assert near.descriptor.lease == packet.descriptor.lease
                ends.remote.memory.arena = ends.link.arenas[SECOND if x is here else CPU]
                (near,) = ends.remote.memory.within_reach([packet])
                assert not near.descriptor.device
    both = [devices.piece(here), devices.piece(there)]
    packet = ends.link.send(both, [0, here.nbytes], 2 * here.nbytes)
    assert not isinstance(packet, cuda_ipc.DeviceBuffer)
    assert ends.link.open(packet).size >= 2 * here.nbytes
    ends.link.arenas[SECOND].take = refuse  # type: ignore[method-assign]
    links[SECOND].send([devices.piece(there)], [0], there.nbytes)
    assert ends.link.arenas == links[SECOND].arenas == {CPU: ends.arena}
    assert links[CPU].name == ends.link.name == "shared and CUDA IPC"


def test_segments_that_are_no_longer_used_go(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides, when many others were used since: batches of ever other sizes do not fill the
    GPU.
    """
    monkeypatch.setattr(cuda_ipc, "_PATIENCE", 8)
    arena, mappings = cuda_ipc.DeviceArena(CPU), Mappings()
    mappings.opener = opener = cuda_ipc.Opener(CPU)
    old = weakref.ref(arena.take(5 << 20).segment)
    assert mappings.find(arena.take(5 << 20).descriptor).piece().size == 5 << 20
    gc.collect()
    lent = arena.take(7 << 20)  # as new weights are: opened once, and in use for long
    kept = mappings.find(lent.descriptor).piece().part(3, 5)
    for _ in range(2 * 64):
        mappings.find(arena.take(100).descriptor).piece()
        gc.collect(0)
    assert old() is None
    assert len(opener._known) == 1
    assert sum(arena.idle().values()) == 1
    assert (len(fake.opened), len(opener._open)) == (3, 2)
    mappings.find(lent.descriptor).piece()
    assert len(fake.opened) == 3  # which is open still
    del lent, kept
    gc.collect()
    arena.close()
    assert not arena.idle()
    assert len({*map(id, fake.pools)}) == 1  # all of them from one pool, which is the arena's own


def test_a_segment_is_opened_while_others_are_closed(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread of the driver, which gets an answer of the same replica: it stays open."""
    monkeypatch.setattr(cuda_ipc, "_PATIENCE", 8)
    arena, opener, found = cuda_ipc.DeviceArena(CPU), cuda_ipc.Opener(CPU), list[Any]()
    lent = [arena.take(1 << 20) for _ in range(2)]

    class Seen(int):
        """When a segment was used. As that is looked at, the other thread has its turn."""

        def __gt__(self, other: int) -> bool:
            found.append(opener(lent[1].descriptor))
            return int(self) > other

        def __le__(self, other: int) -> bool:
            found.append(opener(lent[1].descriptor))
            return int(self) <= other

    for _ in range(7):
        opener(lent[0].descriptor)
    opener._known = {token: (one, Seen(at)) for token, (one, at) in opener._known.items()}
    opener(lent[0].descriptor)
    assert {*opener._known} == {each.descriptor.token for each in lent}
    found.clear()
    opener(lent[1].descriptor)
    assert len(fake.opened) == 2


def wrong(*_: object) -> bool:
    """Not what was written."""
    return False


def refuse(*_: object) -> Any:
    """As torch does with expandable segments, and CUDA in some containers."""
    raise RuntimeError("CUDA error: invalid argument")


def test_peers_get_what_lies_on_another_gpu(
    fake: FakeGpu, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one replica alone gets, such as inputs, is copied to its GPU's memory; what several get
    is copied once, and the memory that it was copied from is not written to before it was read. If
    there is no room it goes by the host.
    """
    there = cuda_ipc.DeviceArena(SECOND)
    link, memory = cuda_ipc.DeviceLink(ends.link.near, there, peers=True), ends.remote.memory
    memory.arena, memory.shares = there, True
    ours: Any = SimpleNamespace(link=link, _device_link=link)
    x, mappings = torch.randn(30000), Mappings()
    mappings.opener = cuda_ipc.Opener(CPU)
    assert link.name == "shared and CUDA IPC"
    apart = DriverMemory.link_to(ours, ends.remote).send([devices.piece(x)], [0], x.nbytes)
    assert not isinstance(apart, cuda_ipc.DeviceBuffer)
    there.peers.add(CPU)
    assert link.name == "shared, CUDA IPC and peer copies"
    sent = DriverMemory.link_to(ours, ends.remote).send([devices.piece(x)], [0], x.nbytes)
    assert isinstance(sent, cuda_ipc.DeviceBuffer)
    assert sent.device == SECOND
    packet = ends.arena.fill([devices.piece(x)], [0], x.nbytes)
    fake.log.clear()
    both = [packet, sent, packet]
    found = memory.within_reach(both)
    # read behind what was written; written, on the other GPU; and read
    assert fake.log[-2:] == ["record on device 1", "record"]
    assert "copy to the host" not in fake.log
    assert found[0].descriptor.token == found[2].descriptor.token
    for one in over(found[:2], mappings):
        assert torch.equal(ranges.data_of(one.piece()).view(torch.float32), x)
    other = ends.arena.fill([devices.piece(x)], [0], x.nbytes)
    monkeypatch.setattr(there, "take", no_room)
    assert memory.within_reach([other]) == [x.numpy().tobytes()]
    assert there.peers == {CPU}
    monkeypatch.setattr(there, "take", refuse)
    assert memory.within_reach([other]) == [x.numpy().tobytes()]
    assert not there.peers


def no_room(_size: int) -> Any:
    """What a full GPU says."""
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("right", [True, False])
def test_a_peer_is_tried_before_its_memory_is_used(
    fake: FakeGpu,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    right: bool,
) -> None:
    """In both directions, twice in the same memory; only if that is asked for."""
    monkeypatch.setattr(cuda_ipc, "gpu_in_use", lambda _uuid, peers: SECOND if peers else None)
    monkeypatch.setattr(cuda_ipc, "in_use", lambda: [CPU])
    hello = ReplicaHello(1, "n", "cuda:0", "G", f"{UUID}-1", 1, 1)
    meet_on_device(ends.remote, hello, ends.link)
    assert not ends.link.arenas
    ends.link.peers, copies = True, list[Any]()
    copy = cuda_ipc.copy_each

    def copied(targets: Any, sources: Any) -> None:
        copies.append(targets[0].device)
        if right or len(copies) != 4:  # the second from there: what was there before
            copy(targets, sources)

    monkeypatch.setattr(cuda_ipc, "copy_each", copied)
    meet_on_device(ends.remote, hello, ends.link)
    assert copies[:4] == [CPU, CPU, SECOND, SECOND]
    assert [*ends.link.arenas] == ([SECOND] if right else [])
    assert ("gpu_paths=['peer']) is not used in this process (other" in caplog.text) == (not right)
    if right:
        assert ends.link.arenas[SECOND].peers == {CPU}
        assert ends.remote.memory.arena is ends.link.arenas[SECOND]


@pytest.mark.parametrize("where", ["driver shares", "replica sees", "replica opens", "driver sees"])
def test_a_failed_trial_leaves_host_copies(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Whatever goes wrong, on whichever side: it is said once, and the memory is not used."""
    seen = iter([True, False])
    patches: dict[str, tuple[Any, str, Any]] = {
        "driver shares": (reductions, "reduce_tensor", refuse),
        "replica sees": (cuda_ipc, "sees", wrong),
        "replica opens": (reductions, "rebuild_cuda_tensor", refuse),
        "driver sees": (cuda_ipc, "sees", lambda *_: next(seen)),
    }
    monkeypatch.setattr(*patches[where])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    make = cuda_ipc.DeviceArena
    monkeypatch.setattr(cuda_ipc, "DeviceArena", lambda _device: make(CPU))
    for _ in range(2):
        meet_on_device(ends.remote, ReplicaHello(1, "n", "cuda:0", "G", UUID, 1, 1), ends.link)
        seen = iter([True, False])
    assert ends.remote.memory.arena is None
    assert not ends.link.arenas
    assert ends.link.name == "shared"
    (said,) = [r for r in caplog.records if "CUDA IPC is refused" in r.getMessage()]
    assert said.levelname == "WARNING"


def test_only_the_drivers_own_gpu_is_shared(
    fake: FakeGpu, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By uuid; and only if this process uses GPUs already. With peers any of them."""
    hello = ReplicaHello(1, "n", "cuda:0", "G", UUID, 1, 1)
    assert cuda_ipc.gpu_in_use(UUID) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cuda_ipc.gpu_in_use("") is None
    assert cuda_ipc.gpu_in_use("GPU-other") is None
    assert cuda_ipc.gpu_in_use(UUID) == torch.device("cuda", 0)
    assert cuda_ipc.gpu_in_use(f"{UUID}-1") is None
    assert cuda_ipc.gpu_in_use(f"{UUID}-1", peers=True) == torch.device("cuda", 1)
    fake.used = set()
    assert cuda_ipc.gpu_in_use(f"{UUID}-1", peers=True) is None
    fake.used = {0}
    meet_on_device(ends.remote, hello._replace(gpu_uuid="GPU-other"), ends.link)
    assert not ends.link.arenas
    monkeypatch.setattr(cuda_ipc, "gpu_in_use", lambda *_: CPU)
    meet_on_device(ends.remote, hello, ends.link)
    assert ends.link.arenas
    arena = ends.remote.memory.arena
    assert arena is not None
    assert arena.device == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    near = shared_link(Arena(), True, False)
    assert isinstance(cuda_ipc.reaching(near, False), cuda_ipc.DeviceLink)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_ipc.reaching(near, False) is near


def test_a_full_gpu_sends_another_way(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory this time only; for any other reason from now on."""
    ends.link.arenas[CPU] = ends.arena
    x = torch.randn(30000)

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ends.arena, "take", full)
    assert not isinstance(ends.link.send([devices.piece(x)], [0], x.nbytes), cuda_ipc.DeviceBuffer)
    assert ends.link.arenas
    monkeypatch.setattr(ends.arena, "take", refuse)
    assert not isinstance(ends.link.send([devices.piece(x)], [0], x.nbytes), cuda_ipc.DeviceBuffer)
    assert not ends.link.arenas


def test_what_went_by_the_gpus_memory_is_compared_with_itself(ends: Ends) -> None:
    """It has no fingerprints, and an edit behind its version is found."""
    ends.link.arenas[CPU] = ends.arena
    ends.link.withdraw()  # as for every replica on a GPU
    net = nn.Linear(300, 200)
    tracker = ModuleTracker(net, ends.link)

    def sound() -> bool:
        tracker.sync()
        return tracker.verify()

    assert sound()
    for arena in (ends.arena, None, None):
        ends.link.arenas = {CPU: arena} if arena else {}
        net.weight.data.neg_()
        assert not sound()
        assert sound()
