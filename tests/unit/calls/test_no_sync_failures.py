"""`DataParallel.no_sync` when something goes wrong, or an accumulated gradient is overwritten,
converted or dropped.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accumulating import HERE, assert_alike, backward, batch, lie, lose, small
from mortal import Mortal, rows
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.calls.held_gradients import HeldGradients, HeldPass
from raydp_parallel.calls.remote_gradients import RemoteGradient
from raydp_parallel.cluster.replica_slots import GraphRecipe, RemoteGraph, steps
from raydp_parallel.errors import GraphLost, StateChanged


class HookError(Exception):
    """Raised in the midst of a backward, after the replicas have answered."""


@contextlib.contextmanager
def at_gradient(parameter: Tensor, act: Callable[[], object]) -> Iterator[None]:
    """Act as a parameter's gradient is about to arrive. It is not a hook on the parameter, of which
    gradients would travel at once.
    """
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_prehook(lambda *_: act() and None)  # type: ignore[union-attr]
    try:
        yield
    finally:
        handle.remove()


def fail(kind: type[BaseException] = HookError) -> object:
    """Raise an exception."""
    raise kind


def follow(net: nn.Module, plain: nn.Module, before: list[Tensor | None]) -> list[bool]:
    """Set a plain module's gradients to what a pass that failed has left: each is what it was, or
    that with the new one. Returns which have the new one.
    """
    arrived = []
    for p, q, old in zip(net.parameters(), plain.parameters(), before, strict=True):
        assert q.grad is not None
        now = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        kept = torch.zeros_like(p) if old is None else old
        arrived.append(torch.allclose(now, q.grad, rtol=1e-11, atol=1e-11))
        if not arrived[-1]:
            torch.testing.assert_close(now, kept, rtol=1e-11, atol=1e-11)
            q.grad = None if old is None else old.clone()
    return arrived


@pytest.mark.parametrize("kind", [HookError, KeyboardInterrupt])
@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("which", range(4))
def test_X7_an_exception_in_the_midst_of_a_backward_loses_nothing(
    which: int, hold: bool, kind: type[BaseException]
) -> None:
    """Parameters that torch has not come to keep what they had, as with torch."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, ["cpu", "cpu"], options=HERE)
    for number in range(2):
        backward(model, batch(number), hold=True)
        backward(plain, batch(number))
    for number in (2, 3):
        before = [p.grad.clone() for p in plain.parameters()]  # type: ignore[union-attr]
        parameter = [*net.parameters()][which]
        with at_gradient(parameter, lambda: fail(kind)), pytest.raises(kind):
            backward(model, batch(number), hold=hold)
        backward(plain, batch(number))
        assert not follow(net, plain, [*before])[which]
    backward(model, batch(4), hold=True)
    backward(plain, batch(4))
    backward(model, batch(5))
    backward(plain, batch(5))
    assert not any(lie(net))
    assert_alike(net, plain)


@pytest.mark.parametrize("hold", [True, False])
def test_X7_what_a_pass_that_failed_has_used_up_is_made_again(two: Executor, hold: bool) -> None:
    """In the replicas, which added to it in place; and by the next backward, without a fetch."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    for number in range(3):
        backward(model, batch(number), hold=True)
        backward(plain, batch(number))
    with at_gradient(net[2].bias, fail), pytest.raises(HookError):
        backward(model, batch(3), hold=hold)
    expected = plain[2].bias.grad.clone()  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldGradients, "_fetch", lambda _: fail(AssertionError))
        assert isinstance(net[2].bias.grad, RemoteGradient)
        backward(model, batch(4), hold=True)
    plain.zero_grad()
    backward(plain, batch(4))
    expected += plain[2].bias.grad
    torch.testing.assert_close(net[2].bias.grad.clone(), expected)


def test_X7_weights_that_changed_after_a_pass_that_failed_are_noticed() -> None:
    """What it had used up cannot be made again then, and nothing is computed without it."""
    net = small()
    model = DataParallel(net, ["cpu", "cpu"], options=HERE)
    backward(model, batch(0), hold=True)
    bias = net[2].bias
    with at_gradient(bias, fail), pytest.raises(HookError):
        backward(model, batch(1), hold=False)
    with torch.no_grad():
        net[0].weight.mul_(2)
    for use in (lambda: bias.grad.norm(), lambda: backward(model, batch(2))):  # type: ignore[union-attr]
        with pytest.raises(StateChanged, match=r"weight.* was changed.*accumulate again"):
            use()
    net.zero_grad()
    plain = copy.deepcopy(net)
    backward(model, batch(2))
    backward(plain, batch(2))
    assert_alike(net, plain)


@pytest.mark.parametrize("act", ["scale", "zero", "none", "read"])
@pytest.mark.parametrize("hold", [True, False])
def test_X7_gradients_that_change_while_a_backward_adds_to_them(hold: bool, act: str) -> None:
    """Its sums include what was there; that is an error where it is not there any more."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, ["cpu", "cpu"], options=HERE)
    backward(model, batch(0), hold=True)
    backward(plain, batch(0))
    late, first = net[0].weight, net[0].weight.grad.clone()  # type: ignore[union-attr]
    seen: list[Tensor] = []

    def change() -> None:
        grad = late.grad
        assert grad is not None
        if act == "scale":
            grad.mul_(2)
        elif act == "zero":
            grad.zero_()
        elif act == "none":
            late.grad = None
        else:
            seen.append(grad.clone() + 0)

    fine = act == "read"
    with at_gradient(late, change):
        if fine:
            backward(model, batch(1), hold)
        else:
            with pytest.raises(StateChanged, match="changed while a backward ran"):
                backward(model, batch(1), hold)
    if fine:
        torch.testing.assert_close(seen[0], first.clone())
        backward(plain, batch(1))
        assert_alike(net, plain)


def test_X7_a_pass_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, though an interrupt has kept the backward from saying so."""
    net = small()
    model = DataParallel(net, ["cpu", "cpu"], options=HERE)
    backward(model, batch(0), hold=True)
    loss = model(batch(1)).square().sum()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HeldPass, "end", lambda _: None)
        patch.setattr(Executor, "run", lambda *_: fail(KeyboardInterrupt))
        loss.backward()
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(net[2].bias.grad.clone()), daemon=True)  # type: ignore[union-attr]
    thread.start()
    thread.join(60)
    assert len(found) == 1


class Fragile(nn.Module):
    """Its backward fails before or after it has given the last layer a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: Tensor, where: str) -> Tensor:
        found = self.net[1](self.net[0](x))
        out: Tensor = self.net[2](found)
        if where:
            (out if where == "before" else found).register_hook(lambda _: 1 / 0)
        return out


@pytest.mark.parametrize("where", ["before", "after"])
def test_X7_a_module_s_own_failure_without_replays(two: Executor, where: str) -> None:
    """With faults raised nothing is made again: what no replica has written to is there; of the
    rest the error says what is lost, and what to do.
    """
    net = Fragile()
    plain = copy.deepcopy(net)
    options = Options(in_process=True, on_fault="raise")
    model = DataParallel(net, ["cpu", "cpu"], options=options)

    def run(module: nn.Module, number: int, fails: str = "", hold: bool = False) -> None:
        with model.no_sync() if hold else contextlib.nullcontext():
            loss = module(batch(number), fails).square().sum()
        loss.backward()

    for number in range(2):
        run(model, number, hold=True)
        run(plain, number)
    with pytest.raises(ZeroDivisionError):
        run(model, 2, where, hold=True)
    if where == "after":
        with pytest.raises(GraphLost, match=r"under no_sync\(\).*zero, and accumulate again"):
            run(model, 2)
        for one in (net, plain):
            one.zero_grad()
    run(model, 2)
    run(plain, 2)
    assert_alike(net, plain)


def test_X7_gradients_of_very_many_backwards_are_made_again() -> None:
    """Each is made of the one before."""
    graphs = [RemoteGraph() for _ in range(3000)]
    recipe = GraphRecipe("forward", lambda *_: None)
    for before, graph in itertools.pairwise(graphs):
        parents = [(before, recipe)]
        recipe = GraphRecipe("backward", lambda *_: None, parents)
        graph.recipe = recipe
    slot: Any = object()
    assert [step.graph for step in steps([graphs[-1]], slot)] == graphs


def test_X7_a_module_is_freed_with_its_gradients(two: Executor) -> None:
    """Though a parameter refers to its gradient; and a gradient outlasts the wrapper."""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    plain = copy.deepcopy(net)
    for one, hold in ((net, True), (plain, False)):
        model = DataParallel(one, executor=two)
        for number in range(3):
            backward(model, batch(number), hold)
        del model
    gc.collect()
    assert_alike(net, plain)
    model = DataParallel(net, executor=two)
    for number in range(3):
        backward(model, batch(number), hold=True)
    gone = weakref.ref(net), weakref.ref(net[0].weight)
    del model, net, one
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_X7_a_copy_that_was_made_within_is_not_within(two: Executor) -> None:
    """It would leave its gradients in the replicas for ever."""
    model = DataParallel(small(), executor=two)
    with model.no_sync():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in copies:
        backward(one, batch(0))
        assert not any(lie(one.module))
        with one.no_sync():
            one(batch(0)).sum().backward()
        assert all(isinstance(p.grad, RemoteGradient) for p in one.module.parameters())


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.float64])
def test_X7_a_module_that_gets_another_dtype(wrapped: bool, to: torch.dtype) -> None:
    """Its gradients get that too."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, ["cpu", "cpu"], options=HERE)
    for number in range(2):
        backward(model, batch(number), hold=True)
        backward(plain, batch(number))
    (model if wrapped else net).to(to)
    plain.to(to)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.dtype == p.grad.dtype == to
        torch.testing.assert_close(p.grad.clone(), q.grad)
    if to is not torch.float16:
        x = batch(2).to(to)
        for hold in (True, False):
            backward(model, x, hold)
            backward(plain, x)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.long
def test_X7_what_is_overwritten_is_not_fetched(killable: Executor, tmp_path: Path) -> None:
    """Zeroing lost gradients is what errors advise, also where they are added to memory of this
    process; so does a program that copies its own into them.
    """
    net = nn.Linear(6, 3)
    plain, model = copy.deepcopy(net), DataParallel(Mortal(net, tmp_path), executor=killable)
    for begin in ("base", "alone"):
        for act in ("zero", "copy"):
            net.zero_grad()
            address = 0
            if begin == "base":
                net.weight.grad, net.bias.grad = torch.ones(3, 6), torch.ones(3)
                address = net.weight.grad.data_ptr()
            backward(model, rows(2, 0), hold=True)
            with torch.no_grad():
                net.weight.mul_(2)
            lose(model, tmp_path, 1)
            killable.grow()
            with pytest.raises(StateChanged):
                net.weight.grad.sum()  # type: ignore[union-attr]
            if act == "zero":
                net.zero_grad(set_to_none=False)
            else:
                for p in net.parameters():
                    p.grad.copy_(torch.ones_like(p))  # type: ignore[union-attr]
            plain.load_state_dict(net.state_dict())
            for p in plain.parameters():
                p.grad = torch.zeros_like(p) if act == "zero" else torch.ones_like(p)
            assert net.weight.grad is not None
            assert address in (0, net.weight.grad.data_ptr())
            backward(model, rows(2, 2))
            backward(plain, rows(2, 2)[:, 1:])
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad.clone(), q.grad)  # type: ignore[union-attr]
