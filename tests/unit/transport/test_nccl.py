"""Groups of nccl's, on a fake one: what is asked of it, in which order, on which streams, and which
is told to leave.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fake_nccl
import pytest
import torch
from fake_gpu import FakeGpu, installed, queued
from mortal import arm, armed, rows, same, state, whole
from test_collective import Wide, among, back, together, word

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.devices import Lane, Makers
from raydp_parallel.devices.cuda import on_device
from raydp_parallel.devices.ranges import on_host
from raydp_parallel.transport.collective import Group, Groups, Reducer, pass_on
from raydp_parallel.transport.collective.backends import Nccl
from raydp_parallel.transport.cuda_ipc import DeviceArena, DeviceLink
from raydp_parallel.transport.group_messages import GroupKind, JoinGroup, Leg, Relay, SumOutcome
from raydp_parallel.transport.links import Attachments, ObjectStoreLink
from raydp_parallel.transport.messages import Blob

CPU = torch.device("cpu")


@pytest.fixture
def nccl() -> Iterator[list[str]]:
    """It is there; what is asked of it."""
    with fake_nccl.installed() as log:
        yield log


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_nccl_have_the_order_of_the_chunks(nccl: list[str], size: int) -> None:
    """To the bit; one sum is put behind the other, also if one member begins early and another at
    the end.
    """
    grads = [[torch.randn(n) * 10.0**k for n in (300_000, 500, 290_000)] for k in range(size)]

    def work(rank: int, group: Group) -> Any:
        leaves = [torch.zeros_like(grad, requires_grad=True) for grad in grads[rank]]
        reducer = Reducer(group, word(0, range(size), 3), leaves, back())
        if rank:
            with reducer.watching():
                for leaf, grad in zip(leaves, grads[rank], strict=True):
                    (leaf * grad).sum().backward()
        assert reducer.finish(grads[rank]) is SumOutcome.DONE
        return reducer.sums()

    found = together(size, work, GroupKind.NCCL)
    for k, total in enumerate(found[0]):
        expected = grads[0][k].clone()
        for rank in range(1, size):
            expected += grads[rank][k]
        assert torch.equal(total, expected)
    assert sorted(line for line in nccl if "made" in line) == [
        f"made {k}/{size}, 10 s, True" for k in range(size)
    ]
    assert nccl.count("connected cpu") == size
    # Two rounds of the probe, and each of two buckets.
    assert nccl.count("broadcast") == (8 if size == 2 else 0)
    assert nccl.count("alltoall_base") == nccl.count("gather") == (0 if size == 2 else 12)


def test_a_member_that_waits_in_a_kernel_is_told_to_leave(nccl: list[str]) -> None:
    """Nothing else ends that wait. What ends because it was aborted is not taken for a sum."""
    told, left = threading.Barrier(2), []

    def work(rank: int, group: Group) -> Any:
        if rank:
            told.wait(30)
            return SumOutcome.FAILED
        leaf = torch.ones(400_000, requires_grad=True)
        threading.Thread(target=lambda: (time.sleep(0.3), left.append(group.leave()))).start()
        outcome = Reducer(group, word(1, (0, 1), 1, patience=600.0), [leaf], back()).finish(
            [leaf.detach()]
        )
        told.wait(30)
        return outcome

    began = time.monotonic()
    assert together(2, work, GroupKind.NCCL) == [SumOutcome.FAILED] * 2
    assert time.monotonic() - began < 30 and left and "abort" in nccl


def test_a_member_that_waits_is_patient_only_so_long(nccl: list[str]) -> None:
    """Also where it is told nothing."""
    done = threading.Event()

    def work(rank: int, group: Group) -> Any:
        if rank:
            done.wait(30)
            return SumOutcome.FAILED
        leaf = torch.ones(400_000, requires_grad=True)
        try:
            return Reducer(group, word(1, (0, 1), 1, patience=0.3), [leaf], back()).finish(
                [leaf.detach()]
            )
        finally:
            done.set()

    fake_nccl.stream_patience.append(0.1)
    try:
        assert together(2, work, GroupKind.NCCL) == [SumOutcome.FAILED] * 2
    finally:
        fake_nccl.stream_patience.pop()


@pytest.mark.parametrize("kind", [GroupKind.GLOO, GroupKind.NCCL])
def test_a_group_whose_members_do_not_all_come_is_given_up(
    nccl: list[str], kind: GroupKind
) -> None:
    """When it is told to leave, at once; one that is no more it does not join."""
    groups = Groups()
    join = JoinGroup("alone", 0, 2, groups.host("alone"), 600.0, kind)
    telling = threading.Timer(0.3, groups.leave, ["alone"])
    telling.start()
    began = time.monotonic()
    assert "no answer" in groups.join(join)
    assert time.monotonic() - began < 30 and groups.find("alone") is None
    assert "before" in groups.join(join)


def test_without_nccl_there_is_no_such_group() -> None:
    """As in a torch that was built without."""
    groups = Groups()
    assert "AttributeError" in groups.join(
        JoinGroup("none", 0, 1, groups.host("none"), 10.0, GroupKind.NCCL)
    )


def test_a_group_that_cannot_be_aborted_is_let_go(
    nccl: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """That is for the log."""
    caplog.set_level(logging.INFO, "raydp_parallel")
    ended = threading.Event()

    def refuse(_group: Any) -> None:
        ended.set()
        raise RuntimeError("the GPU is gone")

    original, fake_nccl.ProcessGroupNCCL.abort = fake_nccl.ProcessGroupNCCL.abort, refuse  # type: ignore[method-assign]
    try:
        together(1, lambda _rank, group: group.leave(), GroupKind.NCCL)
        assert ended.wait(30)
    finally:
        fake_nccl.ProcessGroupNCCL.abort = original  # type: ignore[method-assign]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU."""
    with installed(monkeypatch) as found:
        yield found


def test_sums_lie_on_a_stream_of_their_own(nccl: list[str], gpu: FakeGpu) -> None:
    """Which begins behind the gradients, uses their memory with the allocator's knowledge, and is
    waited for once.
    """
    groups = Groups(device=CPU)
    assert groups.join(JoinGroup("one", 0, 1, groups.host("one"), 10.0, GroupKind.NCCL)) == ""
    group = groups.find("one")
    assert group is not None and isinstance(group._backend, Nccl)
    tensor = torch.ones(8)
    gpu.log.clear()
    gpu.recorded.clear()  # of the trial
    group.sum(tensor, 0, [0], 10.0).finish(time.monotonic() + 10.0)
    lane = "stream 1"
    begun = [f"stream waits on {lane}", "stream waits on nccl's stream"]
    added = [f"stream waits on {lane}"] * 2  # for the gradients again, and for what others sent
    gathered = ["stream waits on nccl's stream"]
    assert gpu.log == [*begun, *added, *gathered, *["stream waits"] * 2]
    assert gpu.recorded == [lane, lane, ""]
    groups.leave("one")


class OnTwoStreams(torch.autograd.Function):
    """The product with a constant, with a backward on a stream of its own, as a module may have."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, grad: torch.Tensor, stream: Any) -> torch.Tensor:
        ctx.grad, ctx.stream = grad, stream
        return leaf.sum()

    @staticmethod
    def backward(ctx: Any, _one: torch.Tensor) -> Any:  # type: ignore[override]  # of one output
        with torch.cuda.stream(ctx.stream):
            return torch.zeros_like(ctx.grad).copy_(ctx.grad), None, None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("root", [0, None], ids=["for the root", "for all"])
@pytest.mark.parametrize("way", ["while backward runs", "on two streams", "at the end"])
def test_no_wait_between_streams_is_missing(
    nccl: list[str],
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    root: int | None,
    way: str,
) -> None:
    """Gradients are computed late, on the streams of a module; sums are made beside; what reads
    them on the current stream is not waited for by the host. Each kernel finds what was done on the
    streams that its own was told to wait for, and nothing else.
    """
    grads = [[torch.randn(n) * 10.0**k for n in (300_000, 500, 290_000)] for k in range(size)]

    def work(rank: int, group: Group) -> Any:
        leaves = [torch.zeros_like(grad, requires_grad=True) for grad in grads[rank]]
        request = word(0, range(size), 3)._replace(stays=1 if root is None else None)
        reducer = Reducer(group, request, leaves, back())
        found = [torch.zeros_like(grad) for grad in grads[rank]]
        others = [gpu.stream(), gpu.stream()]
        with reducer.watching():
            for number, (leaf, grad) in enumerate(zip(leaves, grads[rank], strict=True)):
                if way == "while backward runs":
                    (leaf * grad).sum().backward()
                elif way == "on two streams":
                    with gpu.on(others[number % 2]):  # as torch's engine has it for the hook
                        OnTwoStreams.apply(leaf, grad, others[number % 2]).backward()
        for late, grad in zip(found, grads[rank], strict=True):
            late.copy_(grad)
        assert reducer.finish(found) is SumOutcome.DONE
        return [total.clone() for total in reducer.shared()]

    with queued(monkeypatch, gpu):
        totals = together(size, work, GroupKind.NCCL, gpu.process)
    for k in range(3):
        expected = grads[0][k].clone()
        for rank in range(1, size):
            expected += grads[rank][k]
        for found in totals if root is None else totals[:1]:
            assert torch.equal(found[k], expected)


def test_what_members_give_each_other_is_read_behind_it(
    nccl: list[str], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each gives is computed late, too, and overwritten at once. What it gets was made on
    another stream than the one that reads it, as the allocator is told.
    """

    def work(rank: int, group: Group) -> Any:
        whole = torch.zeros(6).copy_(torch.arange(6.0) + 10 * rank)
        got = group.swap(whole, 10.0, time.monotonic() + 10.0)
        whole.fill_(-1.0)
        return got.clone()

    with queued(monkeypatch, gpu):
        found = together(3, work, GroupKind.NCCL, gpu.process)
    assert gpu.recorded.count("") == 3 * (2 + 1)  # two rounds of the probe, and this one
    for rank, got in enumerate(found):
        expected = [10 * k + 2 * rank + at for k in range(3) for at in range(2)]
        assert got.tolist() == expected


class Update(NamedTuple):
    """What of a `StateUpdate` travels."""

    blobs: tuple[Blob, ...]


def test_contents_that_came_over_the_gpu_are_passed_on_by_the_host(gpu: FakeGpu) -> None:
    """As CUDA IPC brings them to a replica on the driver's GPU, and others are to have them."""
    arena, data = DeviceArena(CPU), torch.arange(3000, dtype=torch.uint8)
    packet = arena.fill([on_device(data)], [0], 3000)
    sizes = (1000, 2000)
    relay = Relay((Leg("test", 0),), sizes, True, 10.0)
    host = Groups(secret="secret")
    store = host.host("test")

    def member(rank: int) -> bytes:
        groups = (host, Groups(secret="secret"))[rank]
        assert groups.join(JoinGroup("test", rank, 2, store, 10.0, GroupKind.GLOO)) == ""
        attachments = Attachments(DeviceLink(ObjectStoreLink(), arena), [] if rank else [packet])
        blob = Blob((7, 8), (0, 1024) if rank else (0, 1000), sizes, None if rank else 0)
        found = pass_on(relay._replace(source=not rank), Update((blob,)), attachments, groups)  # type: ignore[arg-type]
        assert found is not None
        whole = on_host(attachments.open(found[0].blobs[0].packet))
        groups.leave("test")
        return b"".join(
            ctypes.string_at(whole.address + at, size)
            for at, size in zip(blob.offsets, sizes, strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(member, range(2))] == [data.numpy().tobytes()] * 2


def test_gradients_of_several_streams_are_packed_behind_all_of_them(gpu: FakeGpu) -> None:
    """A module may compute on streams of its own."""
    makers, other = Makers(CPU), gpu.stream()
    makers.catch_up()
    makers.note()
    with gpu.on(other):
        makers.note()
    gpu.log.clear()
    makers.catch_up()
    assert gpu.log == ["stream waits"]


def test_on_a_cpu_there_are_no_streams() -> None:
    """Nothing is asked of CUDA."""
    lane, makers = Lane(CPU), Makers(CPU)
    makers.note()
    makers.catch_up()
    with lane.taken(torch.ones(1)):
        pass
    lane.rejoin(torch.ones(1))


# --- replicas ---


class OnGpus(Wide):
    """Lets the processes that run it have nccl."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake_nccl.install()
        return super().forward(x)


@pytest.fixture(scope="module")
def three(cluster: None) -> Iterator[Executor]:
    """Three replicas that the driver takes for three GPUs of one node."""
    options = Options(link="collective", gpu_paths=("nccl",))
    with Executor(["cpu"] * 3, options=options) as executor:
        yield executor


def pose(executor: Executor, uuids: Sequence[str]) -> None:
    """Let the driver take replicas for ones on these GPUs."""
    for slot, uuid in zip(executor.replica_set.slots.values(), uuids, strict=True):
        assert slot.hello is not None
        slot.hello = fake_nccl.uuid_of(slot.hello, uuid)


def train(
    executor: Executor, folder: Path, plan: dict[int, Sequence[str]], pretend: bool = True
) -> list[torch.Tensor]:
    """Train, arming ``plan[step]`` before each step, on replicas that are all there."""
    torch.manual_seed(3)
    model = DataParallel(OnGpus(folder), executor=executor)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for number in range(4):
        if pretend:
            pose(whole(executor), ["a", "b", "c"])
        arm(folder, *plan.get(number, ()))
        optimizer.zero_grad()
        torch.manual_seed(number)
        loss = model(rows(3, number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


@pytest.mark.long
def test_a_death_in_the_midst_of_a_sum_of_nccl(three: Executor, tmp_path: Path) -> None:
    """Two wait in kernels that would never end; the driver tells them, and the step has the same
    bits.
    """
    expected = train(whole(three), tmp_path, {}, False)
    exchanged = among(three)
    began = time.monotonic()
    three.groups._wait = 600.0  # so that only a replica that is told leaves
    assert same(train(three, tmp_path, {}), expected)
    assert among(three) > exchanged, "two GPUs of one node sum among themselves"
    # besides, gloo passes weights on
    assert GroupKind.NCCL in {known.kind for known in three.groups._known.values()}
    assert same(train(three, tmp_path, {1: ["midway 2"], 2: ["midway 0"]}), expected)
    assert not armed(tmp_path) and time.monotonic() - began < 200


def test_two_replicas_on_one_gpu_are_in_no_group_of_nccl(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor some of which one is on a CPU. Where a group of nccl's cannot be made, no other
    is tried.
    """
    three = executors(3, link="collective", name="killable")
    options = Options(link="collective", gpu_paths=("nccl",))
    monkeypatch.setattr(three.replica_set, "options", options)
    kind_of = three.groups.kind
    slots = [*three.replica_set.slots.values()]
    for slot in slots:
        monkeypatch.setattr(slot, "hello", slot.hello)  # as it is again afterwards
    pose(three, ["", "", ""])
    assert kind_of(slots) is GroupKind.GLOO
    pose(three, ["a", "b", "b"])
    assert kind_of(slots) is GroupKind.GLOO
    assert kind_of(slots[:2]) is GroupKind.NCCL
    pose(three, ["a", "b", ""])
    assert kind_of(slots) is GroupKind.GLOO
    pose(three, ["a", "b", "c"])
    assert kind_of(slots) is GroupKind.NCCL
    size = 1 << 20
    with monkeypatch.context() as patch:  # by default no sum goes by what was never seen on a GPU
        patch.setattr(three.replica_set, "options", Options())
        assert kind_of(slots) is GroupKind.GLOO
        assert not three.groups.wanted(slots, size, None)
    with monkeypatch.context() as patch:
        patch.setattr(three.groups, "_gather", lambda *_: "no GPU like that")
        patch.setattr(three.groups, "_not_before", 0.0)
        patch.setattr(three.groups, "_no_nccl", False)
        patch.setattr(three.groups, "_pause", 10.0)
        assert three.groups.find(slots[:2], size, GroupKind.NCCL) is None
        assert kind_of(slots) is GroupKind.GLOO
    assert kind_of(slots) is GroupKind.NCCL


@pytest.mark.long
def test_who_hangs_is_ended_and_the_others_are_told(three: Executor, tmp_path: Path) -> None:
    """Stopped, and killed from outside, as by the system: before that none knows, after it all
    do.
    """
    expected = train(whole(three), tmp_path, {}, False)
    three.groups._wait = 600.0
    deaths = three.stats().deaths
    (tmp_path / "stop midway 1 0").touch()

    def end() -> None:
        while (tmp_path / "stop midway 1 0").exists():
            time.sleep(0.01)
        [*three.replica_set.slots.values()][1].client.end()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        assert same(train(three, tmp_path, {}), expected)
        ended.result(30)
    assert three.stats().deaths == deaths + 1
