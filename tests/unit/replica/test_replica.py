"""One replica, spoken to directly: no client, no executor, no Ray."""

from __future__ import annotations

import itertools
import struct
import warnings
from typing import Any

import pytest
import torch
from harness import raised
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import GraphLost, ReplicaExit
from raydp_parallel.devices import ambient_state, process
from raydp_parallel.replica import autograd_engine, exceptions, replica
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import (
    Arguments,
    BackwardRequest,
    Forget,
    ForwardRequest,
    Produced,
    Reply,
)

CPU = torch.device("cpu")
_keys = itertools.count(1)

FORWARD = ForwardRequest(
    **{**dict.fromkeys(ForwardRequest._fields), "chunk": 0, "seed": 1, "write_back": True}
)._replace(capture=(), doubtful=(), detach=False)
BACKWARD = BackwardRequest(**dict.fromkeys(BackwardRequest._fields))._replace(
    partial=False, keep=False, bumped=(), write_back=True, inner=(), whole=(), noted=()
)


class Driver:
    """The least that a driver does: one master copy, one replica."""

    def __init__(self, module: nn.Module, far: replica.Replica | None = None) -> None:
        self.tracker = ModuleTracker(module, InlineLink())
        self.replica = far or replica.Replica(CPU)
        self.held = 0

    def forward(
        self, *args: Any, graph: bool = True, forget: Forget | None = None, **changes: Any
    ) -> tuple[Any, Reply]:
        """Run one chunk; returns its output and the reply."""
        self.tracker.sync()
        attachments = Attachments(InlineLink())
        update = self.tracker.update_from(self.held)
        parcel, _ = codec.encode(Arguments(args, {}), attachments, "", requires_grad=graph)
        request = FORWARD._replace(
            model=self.tracker.id,
            update=update.placed(attachments) if update is not None else None,
            graph=next(_keys) if graph else None,
            inputs=parcel,
            context=ambient_state.capture(),
            forget=forget,
        )._replace(**changes)
        self.key = request.graph or 0
        back = Attachments(InlineLink())
        reply = self.replica.forward(request, attachments, back)
        self.held = reply.revision
        self.tracker.verify()
        if reply.value is None:
            return None, reply
        value = codec.decode(reply.value, back, CPU)[0]
        return value, reply

    def backward(self, *grads: Tensor, **changes: Any) -> tuple[Any, Reply]:
        """Differentiate the last forward's graph."""
        attachments, back = Attachments(InlineLink()), Attachments(InlineLink())
        parcel, _ = codec.encode(tuple(grads), attachments, "")
        leaves = (
            self.replica._graphs[self.key].leaves[self.key]
            if self.key in self.replica._graphs
            else ()
        )
        request = BACKWARD._replace(
            model=self.tracker.id,
            graph=self.key,
            outputs=((self.key, tuple(range(len(grads)))),),
            grads=parcel,
            needed=(True,) * len(leaves),
            context=ambient_state.capture(),
        )._replace(**changes)
        reply = self.replica.backward(request, attachments, back)
        return (None if reply.value is None else codec.decode(reply.value, back, CPU)[0]), reply


def failed(reply: Reply) -> BaseException:
    """What a reply's failure is raised as."""
    assert reply.failure is not None
    return raised(lambda: exceptions.reraise(reply.failure, "replica 0"))  # type: ignore[arg-type]


class Square(nn.Module):
    """Two outputs, one parameter, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The buffer is written in place."""
        self.count += 1  # type: ignore[operator]
        return (self.weight * x).square(), self.weight.sum() + x.sum()


X = torch.tensor([1.0, 2.0])


def written_number(reply: Reply) -> float:
    """The one number that a forward changed, as it was reported."""
    assert reply.written is not None
    found: float
    (found,) = struct.unpack("f", reply.written.blob.packet)
    return found


def test_forward_gives_the_output_and_what_was_written() -> None:
    """The buffer's new contents come back; the replica's next forward starts from the master's
    again.
    """
    driver = Driver(Square())
    (first, _), reply = driver.forward(X)
    assert torch.equal(first, torch.tensor([4.0, 36.0]))
    assert reply.failure is None
    assert written_number(reply) == 1
    _, reply = driver.forward(X)
    assert written_number(reply) == 1
    assert reply.revision == driver.tracker.revision
    assert reply.seconds > 0


class Turned(nn.Module):
    """Turns a buffer in place: it has another shape then, at the same address."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.arange(6.0).view(2, 3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, turn: Tensor) -> Tensor:
        """The buffer, and another one that is written to in each forward."""
        self.count += 1  # type: ignore[operator]
        if turn:
            self.grid.t_()  # type: ignore[operator]
        return self.grid + self.count  # type: ignore[operator]


def test_a_tensor_that_lies_otherwise_at_its_address_is_made_anew() -> None:
    """In whatever order forwards turn it, and write to the other one."""
    module = Turned()
    driver = Driver(module)
    for turn in (False, True, True, False, True):
        found, reply = driver.forward(torch.tensor(turn), graph=False)
        expected = module.grid + 1  # type: ignore[operator]
        assert reply.failure is None
        assert torch.equal(found, expected.t() if turn else expected)


def test_without_write_back_nothing_is_reported() -> None:
    """Chunks other than the first keep what they did to themselves."""
    _, reply = Driver(Square()).forward(X, write_back=False)
    assert reply.written is None


def test_nothing_is_kept_without_a_key() -> None:
    """Under no_grad the driver asks for no graph."""
    driver = Driver(Square())
    (first, _), _ = driver.forward(X, graph=False)
    assert not first.requires_grad
    assert driver.replica.holdings() == (1, 0)


def test_nothing_is_kept_that_has_no_gradient() -> None:
    """A frozen module and an input without gradient leave no graph behind."""
    driver = Driver(Square().requires_grad_(False))
    driver.forward(X)
    assert driver.replica.holdings() == (1, 0)


def test_backward_gives_a_gradient_per_leaf() -> None:
    """The parameter's, then the input's, as torch has them."""
    module = Square()
    driver = Driver(module)
    x = X.clone().requires_grad_()
    driver.forward(x)
    found, reply = driver.backward(torch.ones(2), torch.tensor(3.0))
    assert reply.failure is None
    y, z = module(x)
    expected = torch.autograd.grad(y.sum() + 3 * z, (module.weight, x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backward_of_one_output_alone() -> None:
    """Only the outputs that have a gradient are differentiated (row B8)."""
    driver = Driver(Square())
    driver.forward(X)
    (found,), _ = driver.backward(torch.tensor(3.0), outputs=((driver.key, (1,)),))
    assert found.tolist() == [3, 3]


@pytest.mark.parametrize("needed", ((True, False), (False, True), (False, False)))
def test_only_what_is_asked_for_is_computed(needed: tuple[bool, bool]) -> None:
    """The others are None, and do not travel."""
    driver = Driver(Square())
    driver.forward(X.clone().requires_grad_())
    found, reply = driver.backward(torch.ones(2), needed=needed, partial=True)
    assert [g is not None for g in found] == [*needed]
    assert reply.value is not None
    assert len(reply.value.specs) == sum(needed)


def test_backward_leaves_no_gradient_in_the_replica() -> None:
    """Sums are the driver's business."""
    driver = Driver(Square())
    for _ in range(2):
        driver.forward(X)
        (found,), _ = driver.backward(torch.ones(2))
        assert found.tolist() == [4, 24]


def test_a_freed_graph_raises_torchs_error_a_kept_one_does_not() -> None:
    """``keep`` is retain_graph."""
    driver = Driver(Square())
    driver.forward(X)
    driver.backward(torch.ones(2), keep=True)
    driver.backward(torch.ones(2))
    _, reply = driver.backward(torch.ones(2))
    assert "backward through the graph a second time" in str(failed(reply))


def test_a_graph_that_was_let_go_is_told_so() -> None:
    """With our own error, which says what to do."""
    driver = Driver(Square())
    driver.forward(X)
    driver.replica.forget(Forget((driver.key,), ()))
    assert driver.replica.holdings() == (1, 0)
    _, reply = driver.backward(torch.ones(2))
    error = failed(reply)
    assert type(error) is GraphLost
    assert "run forward again" in str(error)


def test_a_derived_graph_can_be_differentiated() -> None:
    """Second order: by the incoming gradients, and, with what its graph's own outputs received, by
    the old leaves.
    """
    module = Square()
    driver = Driver(module)
    x = X.clone().requires_grad_()
    driver.forward(x)
    incoming = torch.ones(2, requires_grad=True)
    key = next(_keys)
    first, reply = driver.backward(incoming, keep=True, derived=key)
    assert reply.value is not None
    assert all(t.requires_grad for t in first)
    assert driver.replica.holdings() == (1, 2)
    outputs = (key, (1,))
    (by_incoming,), reply = driver.backward(
        torch.ones(2), graph=key, outputs=(outputs,), needed=(True,), keep=True
    )
    assert reply.failure is None
    both = outputs, (driver.key, (0,))
    second, reply = driver.backward(
        torch.ones(2), torch.ones(2), outputs=both, needed=(True, True), keep=True
    )
    assert reply.failure is None
    y, _ = module(x)
    (g,) = torch.autograd.grad(y, x, incoming, create_graph=True)
    expected = torch.autograd.grad(g.sum() + y.sum(), (module.weight, x, incoming))
    assert all(torch.equal(a, b) for a, b in zip((*second, by_incoming), expected, strict=True))


def test_what_is_forgotten_rides_on_a_call() -> None:
    """Graphs and models; others stay."""
    far = replica.Replica(CPU)
    one, other = Driver(Square(), far), Driver(Square(), far)
    one.forward(X)
    other.forward(X)
    assert far.holdings() == (2, 2)
    other.forward(X, forget=Forget((one.key, other.key), (one.tracker.id,)))
    assert far.holdings() == (1, 1)
    far.forget(Forget((404,), (404,)))
    far.forget(None)
    assert far.holdings() == (1, 1)


class Raises(nn.Module):
    """Ends as it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """After writing to a buffer and warning."""
        self.count += 1  # type: ignore[operator]
        warnings.warn("before the end", stacklevel=1)
        raise self.error


@pytest.mark.parametrize("error", (ValueError("wrong"), SystemExit(3), KeyboardInterrupt()))
def test_A7_a_replica_outlives_whatever_its_module_raises(error: BaseException) -> None:
    """The failure is an answer, with what was written and warned before (row A5)."""
    driver = Driver(Raises(error))
    value, reply = driver.forward(X)
    assert value is None
    assert reply.written is not None
    assert [w.text for w in reply.warnings] == ["before the end"]
    assert reply.revision == driver.tracker.revision
    expected = type(error) if isinstance(error, Exception) else ReplicaExit
    assert type(failed(reply)) is expected
    _, reply = driver.forward(X)
    assert type(failed(reply)) is expected
    assert not process.running_replica()


def test_an_output_that_cannot_be_sent_is_a_failure() -> None:
    """It names the path, and the replica goes on."""
    _, reply = Driver(Gives()).forward(X)
    assert "output['g'] is a builtins.generator" in str(failed(reply))


class Gives(nn.Module):
    """Returns what cannot be pickled."""

    def forward(self, x: Tensor) -> Any:
        """A generator among other things."""
        return {"x": x, "g": (i for i in range(3))}


def test_a_state_that_cannot_be_adopted_is_forgotten() -> None:
    """Half adopted is worse than absent: the revision says that everything has to be sent again."""
    driver = Driver(Square())
    driver.forward(X)
    driver.tracker.module.weight = nn.Parameter(torch.ones(2))
    driver.tracker.sync()
    update = driver.tracker.update_from(driver.held)
    assert update is not None
    broken = update.message._replace(structure=b"not a pickle")
    _, reply = driver.forward(X, update=broken)
    assert reply.failure is not None
    assert reply.revision == 0
    (first, _), reply = driver.forward(X)
    assert first.tolist() == [1, 4]


class Looks(nn.Module):
    """Tells what it sees of its surroundings."""

    def forward(self, x: Tensor) -> Any:
        """Whether a replica runs; what autocast and grad mode are; random numbers."""
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return process.running_replica(), modes, torch.rand(3), type(x), self._is_replica


def test_a_module_runs_in_the_callers_context() -> None:
    """And knows that it is a replica's; afterwards nothing of it is left."""
    driver = Driver(Looks())
    with torch.no_grad(), torch.autocast("cpu"):
        (inside, modes, _, kind, flag), _ = driver.forward(X)
    assert (inside, modes, kind, flag) == (True, (False, True), Tensor, True)
    assert not process.running_replica()


def test_A10_random_numbers_follow_seed_and_chunk() -> None:
    """The same on any replica, however often it ran before."""
    driver, other = Driver(Looks()), Driver(Looks())
    numbers = [
        driver.forward(X, seed=s, chunk=c)[0][2] for s, c in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    assert torch.equal(numbers[0], numbers[3])
    assert not torch.equal(numbers[0], numbers[1])
    assert not torch.equal(numbers[0], numbers[2])
    assert torch.equal(other.forward(X, seed=1, chunk=1)[0][2], numbers[1])


def test_capture_brings_outputs_of_submodules() -> None:
    """In the order in which they ran, and the hooks are gone afterwards."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    driver = Driver(net)
    value, _ = driver.forward(X, capture=("0", "1"))
    assert isinstance(value, Produced)
    assert torch.equal(value.captured["1"][0], value.output)
    assert torch.equal(value.captured["0"][0].relu(), value.output)
    value, _ = driver.forward(X)
    assert isinstance(value, Tensor)


def test_detach_gives_gradients_to_inputs_alone() -> None:
    """As upstream's ``replicate(detach=True)``."""
    driver = Driver(Square())
    driver.forward(X.clone().requires_grad_(), detach=True)
    found, _ = driver.backward(torch.ones(2))
    assert len(found) == 1
    assert found[0].tolist() == [8, 36]


class Checkpointed(nn.Module):
    """Runs batch norm again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        """Under a checkpoint."""
        return checkpoint(self.norm, x, use_reentrant=False)


def test_B10_what_a_checkpoint_writes_in_backward_is_reported() -> None:
    """Batch norm's statistics move twice, in forward and in backward, as they do in a plain
    module.
    """
    driver = Driver(Checkpointed())
    x = torch.randn(4, 2, requires_grad=True)
    _, reply = driver.forward(x)
    assert reply.written is not None
    _, reply = driver.backward(torch.ones(4, 2))
    assert reply.failure is None
    assert reply.written is not None
    assert len(reply.written.slots) == 3


def test_B11_a_version_that_moved_in_the_driver_is_found_in_backward() -> None:
    """Torch's own check fires for what the driver did to its copy since the forward."""
    driver = Driver(Square())
    driver.forward(X.clone().requires_grad_())
    slot = driver.tracker._contents.master.slots[0]
    _, reply = driver.backward(torch.ones(2), bumped=(slot,))
    assert "modified by an inplace operation" in str(failed(reply))


def test_the_leaves_that_outputs_depend_on() -> None:
    """What the driver asks of leaves that it computed itself."""
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    assert autograd_engine.reachable([a * b, c.detach()]) >= {id(a), id(b)}
    assert id(c) not in autograd_engine.reachable([a * b, c.detach()])
    assert id(c) in autograd_engine.reachable([c])
