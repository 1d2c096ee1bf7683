"""Gradients that leave while backward runs, on a fake GPU: what waits for what, and that the last
word counts.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, Stream, installed, queued
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import raydp_parallel
from raydp_parallel import devices
from raydp_parallel.calls import autograd
from raydp_parallel.check import training
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.options import Options
from raydp_parallel.replica import gradient_stream
from raydp_parallel.transport import codec, cuda_ipc
from raydp_parallel.transport.links import Attachments, InlineLink, ObjectStoreLink, shared_link

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU, for which every gradient is large."""
    monkeypatch.setattr(gradient_stream, "LARGE", 1)
    monkeypatch.setattr(gradient_stream, "TOGETHER", 1)
    devices.streams._beside.cache_clear()
    with installed(monkeypatch) as found:
        yield found
    devices.streams._beside.cache_clear()


class Backward:
    """One backward with gradients that leave early.

    Args:
        fake: The device.
        loss: What is differentiated.
        leaves: With respect to what.
    """

    def __init__(self, fake: FakeGpu, loss: Tensor, *leaves: Tensor, pinned: bool = True) -> None:
        pin = devices.pinner(CPU) if pinned else None
        self.attachments = Attachments(shared_link(Arena(pin=pin), exposes=False, always=True))
        early = gradient_stream.begin(leaves, self.attachments, CPU)
        assert early is not None
        fake.log.clear()
        with early.watching():
            loss.backward()
        self.log = [*fake.log]
        """What was asked of the device until backward had ended."""
        self.found = [leaf.grad for leaf in leaves]
        self.parcel = early.parcel(self.found, self.attachments)

    def check(self) -> None:
        """What the driver reads is what the leaves have."""
        assert self.parcel is not None
        packet = self.attachments.find(self.parcel.packet)
        most = sum(grad.numel() * grad.itemsize for grad in self.found if grad is not None) + 640
        assert packet.descriptor.size == len(packet.array) <= most
        found = codec.decode(self.parcel, self.attachments, CPU)[0]
        assert len(found) == len(self.found)
        for ours, theirs in zip(found, self.found, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    """Something that gets a gradient."""
    return torch.randn(*shape).requires_grad_()


def told(fake: FakeGpu, tensor: Tensor, what: str) -> Tensor:
    """The tensor, of which the log says when its gradient is computed."""
    tensor.register_hook(lambda _grad: fake.log.append(what))
    return tensor


def test_a_copy_begins_while_backward_runs(fake: FakeGpu) -> None:
    """Behind an event on the stream that computed; the answer waits once, for the last copy."""
    first, last = leaf(4, 4), leaf(4, 4)
    run = Backward(
        fake, (told(fake, torch.randn(2, 4) @ first, "on with backward") @ last).sum(), first, last
    )
    begins = ["record", "stream waits on stream 1", "copy to the host on stream 1"]
    assert run.log == [*begins, "on with backward", *begins]
    assert fake.log[len(run.log) :][:4] == [
        "record",
        "stream waits on stream 1",
        "record on stream 1",
        "wait on stream 1",
    ]
    run.check()


class Late(torch.autograd.Function):
    """The sum of a leaf, with a gradient that a kernel of the current stream has yet to write."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float) -> Tensor:
        ctx.shape, ctx.value = weight.shape, value
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> Any:  # type: ignore[override]  # of one output
        return torch.zeros(ctx.shape).fill_(ctx.value), None


def test_gradients_of_several_streams_leave_behind_all_of_them(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may compute on streams of its own, under which torch adds up and calls the hooks.
    The last one begins a copy of those before it.
    """
    monkeypatch.setattr(gradient_stream, "TOGETHER", 128)
    leaves, pin = [leaf(4, 4), leaf(4, 4)], devices.pinner(CPU)
    attachments = Attachments(shared_link(Arena(pin=pin), exposes=False, always=True))
    with queued(monkeypatch, fake):
        early = gradient_stream.begin(leaves, attachments, CPU)
        assert early is not None
        fake.log.clear()  # of the trial
        with early.watching():
            for number, weight in enumerate(leaves):
                side = fake.stream()
                with fake.on(side):
                    Late.apply(weight, 3.0 + number).backward()
                fake.current_stream().wait_stream(side)  # as torch's engine does in the end
        assert fake.log.count("copy to the host on stream 1") == 2
        parcel = early.parcel([weight.grad for weight in leaves], attachments)
    assert parcel is not None
    found = codec.decode(parcel, attachments, CPU)[0]
    assert [grad.unique().tolist() for grad in found] == [[3.0], [4.0]]


def test_small_ones_go_together_at_the_end(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """And large ones when enough is there, so that the host is not kept busy with copies."""
    monkeypatch.setattr(gradient_stream, "LARGE", 100)
    monkeypatch.setattr(gradient_stream, "TOGETHER", 2000)
    large, small = [leaf(16, 16) for _ in range(5)], [leaf(16) for _ in range(5)]
    x = torch.randn(3, 16)
    for weight, bias in zip(large, small, strict=True):
        x = x @ weight + bias
    run = Backward(fake, x.sum(), *large, *small)
    copies = "copy to the host on stream 1"
    assert (run.log.count("record"), run.log.count(copies)) == (2, 4)
    assert fake.log[len(run.log) :].count(copies) == 6
    assert sum(entry.startswith("wait") for entry in fake.log) == 1
    run.check()


@pytest.mark.usefixtures("fake")
def test_memory_that_is_not_pinned_is_reached_by_buffers(fake: FakeGpu) -> None:
    """Which are pinned, and moved from when the host has waited."""
    weight = leaf(4, 4)
    run = Backward(fake, (torch.randn(2, 4) @ weight).sum(), weight, pinned=False)
    assert run.log.count("pinned buffer") == 1
    run.check()


def twice(weight: Tensor, x: Tensor) -> Tensor:
    """A weight in two checkpoints, each of which runs a backward of its own."""
    for _ in range(2):
        x = checkpoint(lambda y: (y @ weight).tanh(), x, use_reentrant=True)
    return x


def test_a_gradient_that_grows_after_its_copy_began_is_copied_again(fake: FakeGpu) -> None:
    """To the same place, behind the first copy: what the driver gets is the sum."""
    weight, other = leaf(4, 4), leaf(4, 4)
    run = Backward(fake, twice(weight, leaf(2, 4) @ other).sum(), weight, other)
    assert run.log.count("copy to the host on stream 1") == 2
    assert fake.log.count("copy to the host on stream 1") == 3
    run.check()


def edited(_weight: Tensor, other: Tensor) -> None:
    """In place."""
    assert other.grad is not None
    other.grad.mul_(3)


def exchanged(_weight: Tensor, other: Tensor) -> None:
    """For another tensor of the same size."""
    other.grad = torch.full_like(other, 7)


def grown(_weight: Tensor, other: Tensor) -> None:
    """For one that has no room where it was to lie."""
    other.grad = None
    other.data = torch.zeros(9, 4)
    other.grad = torch.full((9, 4), 7.0)


@pytest.mark.parametrize("together", [1, 100])
@pytest.mark.parametrize("change", [edited, exchanged, grown])
def test_a_gradient_that_a_hook_changes_is_right_in_the_end(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], together: int
) -> None:
    """Whatever the hook of another does to it, before or after its copy began."""
    monkeypatch.setattr(gradient_stream, "TOGETHER", together)
    weight, other = leaf(4, 4), leaf(4, 4)
    weight.register_post_accumulate_grad_hook(lambda w: change(w, other))
    run = Backward(fake, (torch.randn(2, 4) @ weight @ other).sum(), weight, other)
    if change is grown:
        assert run.parcel is None  # all of it is sent anew
    else:
        run.check()


def test_what_has_no_gradient_takes_no_room(fake: FakeGpu) -> None:
    """Nor has it any bytes in the packet."""
    used, unused = leaf(4, 4), leaf(900, 4)
    run = Backward(fake, (torch.randn(2, 4) @ used).sum(), unused, used)
    run.check()
    assert run.found[0] is None


def test_a_sparse_gradient_goes_along(fake: FakeGpu) -> None:
    """At the end, as its indices and values; one that is larger than its leaf is sent anew with all
    the others.
    """
    for rows, fits in ((3, True), (500, False)):
        table, weight = leaf(20, 4), leaf(4, 4)
        looked_up = nn.functional.embedding(torch.arange(rows) % 20, table, sparse=True)
        run = Backward(fake, (looked_up @ weight).sum(), table, weight)
        assert (run.parcel is not None) == fits
        if fits:
            run.check()


def test_a_backward_that_fails_waits_for_what_it_began(fake: FakeGpu) -> None:
    """The memory is lent to others next, and must not be written to then."""
    first, last = leaf(4, 4), leaf(4, 4)
    x = torch.randn(2, 4) @ first

    def fail(_grad: Tensor) -> None:
        raise KeyError("a reason")

    x.register_hook(fail)
    with pytest.raises(KeyError, match="a reason"):
        Backward(fake, (x @ last).sum(), first, last)
    assert fake.log[-1] == "wait on stream 1"
    assert not first._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    assert last.grad is not None


def test_want_of_memory_for_copies_is_no_failure(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward goes on, and the gradients are sent as ever."""

    def full(*_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    assert devices.courier(CPU) is not None  # the trial is over
    monkeypatch.setattr(devices.Courier, "carry", full)
    weight, other = leaf(4, 4), leaf(4, 4)
    run = Backward(fake, (torch.randn(2, 4) @ weight @ other).sum(), weight, other)
    assert run.parcel is None
    assert other.grad is not None


def test_gradients_are_kept_until_they_were_copied(fake: FakeGpu) -> None:
    """Torch's allocator knows nothing of the other stream."""
    courier = devices.courier(CPU)
    assert courier is not None
    tensor, room = torch.ones(4), torch.zeros(4)
    fake.pinned[room.data_ptr()] = 16
    alive = weakref.ref(tensor)
    courier.carry([devices.piece(tensor)], [room.data_ptr()])
    near = torch.full((4,), 5.0)
    del tensor
    gc.collect()
    assert alive() is not None
    assert room.tolist() == [0] * 4
    courier.finish()
    gc.collect()
    assert alive() is None
    assert room.tolist() == [1] * 4
    with pytest.MonkeyPatch.context() as patch:  # what lies on the host is moved at once
        patch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
        courier.carry([devices.piece(near)], [room.data_ptr()])
    assert room.tolist() == [5] * 4


def test_where_gradients_do_not_leave_early(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; by links that make a packet at once; on the driver's own GPU; and where it does not
    pay.
    """
    leaves, shared = [leaf(4, 4)], shared_link(Arena(), False, True)

    def early(link: Any, *more: Tensor) -> bool:
        return gradient_stream.begin([*leaves, *more], Attachments(link), CPU) is not None

    assert early(shared)
    assert early(ObjectStoreLink())
    assert early(cuda_ipc.DeviceLink(shared))
    assert not early(cuda_ipc.DeviceLink(shared, cuda_ipc.DeviceArena(CPU)))
    assert not early(ObjectStoreLink(id, id))
    assert not early(InlineLink())
    assert early(shared, torch.zeros(3, 3).to_sparse().requires_grad_())
    assert early(shared_link(Arena(), False, False), leaf(1 << 16))
    assert not early(shared_link(Arena(), False, False))
    monkeypatch.setattr(gradient_stream, "TOGETHER", 65)
    assert not early(shared)
    monkeypatch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
    monkeypatch.setattr(gradient_stream, "TOGETHER", 1)
    assert not early(shared)


CASES = [
    "perceptron, SGD",
    "perceptron, gradient penalty",
    "residual net, channels_last",
    "tied transformer, loss inside",
]


@pytest.mark.parametrize("name", CASES)
def test_training_is_right_with_gradients_that_leave_early(fake: FakeGpu, name: str) -> None:
    """The whole way, by a link that has room also for little."""
    case = training.CASES[name]
    torch.manual_seed(0)
    net = case.make().double()
    plain = training.train(copy.deepcopy(net), case, 4, CPU)
    options = Options(in_process=True, link="object_store", gpu_paths=("courier",))
    model = raydp_parallel.DataParallel(net, ["cpu"], options=options)
    assert training.difference(training.train(model, case, 4, CPU), plain) <= training.TOLERANCE
    assert "wait on stream 1" in fake.log
    copies = fake.log.count("copy to the host on stream 1")
    x = case.batch(0)[0].double() if name != CASES[-1] else None
    if x is not None:  # what was asked for alone
        torch.autograd.grad(model(x).sum(), next(net.parameters()))
        assert fake.log.count("copy to the host on stream 1") == copies


# --- the driver's streams ---


def test_backward_goes_on_behind_the_streams_that_made_its_gradients(fake: FakeGpu) -> None:
    """Torch's engine runs Fork's node, which is the CPU's, on the caller's stream, and waits for no
    other.
    """
    side = fake.stream()
    with fake.on(side):
        here = devices.track(torch.ones(3))
    assert here is not None
    fake.log.clear()
    devices.follow([here])
    assert fake.log == ["stream waits"]
    assert fake.recorded == [""]
    with fake.on(side):
        devices.follow([here])
        assert len(fake.log) == 1
        devices.hand_over([None, torch.ones(3)])
    assert fake.log == ["stream waits"] * 2
    devices.hand_over([torch.ones(3)])
    assert len(fake.log) == 2
    devices.follow([(torch.ones(3, 3).to_sparse(), side)])
    assert len(fake.recorded) == 1


def test_a_whole_backward_on_a_stream_of_the_users(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of one stream, differentiated on another: the trip follows, and what it brings is
    handed over.
    """
    options = Options(in_process=True, link="object_store", gpu_paths=("courier",))
    net = nn.Linear(4, 3)
    model = raydp_parallel.DataParallel(net, ["cpu"], options=options)
    followed: list[Stream] = []
    monkeypatch.setattr(
        autograd.devices, "follow", lambda tracks: followed.extend(stream for _, stream in tracks)
    )
    side = fake.stream()
    out = model(torch.ones(2, 4))
    fake.log.clear()
    with fake.on(side):
        out.sum().backward()
    assert followed == [side]  # a fake engine's nodes have no streams of their own
    assert fake.log[-1] == "stream waits"
    torch.testing.assert_close(net.weight.grad, torch.full((3, 4), 2.0))


@pytest.mark.usefixtures("fake")
def test_a_cpus_tensors_have_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted, nothing waits."""
    monkeypatch.setattr(devices.ranges, "HOST", frozenset({"cpu"}))
    assert devices.track(torch.ones(2)) is None
    devices.hand_over([torch.ones(2), None])
    assert devices.courier(CPU) is None
