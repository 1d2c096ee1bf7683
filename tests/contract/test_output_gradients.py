"""Outputs that were computed from other outputs: with one device upstream runs the module itself,
so that the others have gradients, too (B15).
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel
from raydp_parallel.calls.executor import Executor

pytestmark = pytest.mark.usefixtures("cluster")

Found = Sequence[Tensor | None]


class Chain(nn.Module):
    """Gives its output, and two of the tensors that it was computed from: one by way of the other,
    and beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.first(x).tanh()
        high = self.second(low).tanh() + low
        return self.last(high).tanh(), high, low


def one_by_another(net: Any, x: Tensor) -> Found:
    """As an explanation of a class by features."""
    out, _, low = net(x)
    return torch.autograd.grad(out[:, 0].sum(), low)


def both(net: Any, x: Tensor) -> Found:
    """What comes by way of the other one counts once."""
    out, high, low = net(x)
    return torch.autograd.grad(out.square().sum(), [low, high])


def retained(net: Any, x: Tensor) -> Found:
    """The whole gradient, and those of weights with it."""
    out, high, low = net(x)
    low.retain_grad()
    high.retain_grad()
    (out.square().sum() + low.pow(3).sum() + high.sum()).backward()
    return low.grad, high.grad


def only_the_lower(net: Any, x: Tensor) -> Found:
    """What nothing asks for is no matter of the driver's."""
    out, high, low = net(x)
    low.retain_grad()
    (out.square().sum() + high.pow(2).sum()).backward()
    return (low.grad,)


def hooked(net: Any, x: Tensor) -> Found:
    """A hook here changes what goes on from there; the tensor itself may be gone."""
    seen: list[Tensor] = []
    out, _, low = net(x)
    low.register_hook(lambda grad: seen.append(grad) or grad * 2)
    del low
    out.square().sum().backward()
    return seen


def twice(net: Any, x: Tensor) -> Found:
    """A penalty on the gradients of features."""
    out, high, low = net(x)
    found = torch.autograd.grad(out.square().sum() + low.sum(), [low, high], create_graph=True)
    (found[0].square().sum() + found[1].pow(3).sum() + out.sum()).backward()
    return found


def with_weights(net: Any, x: Tensor) -> Found:
    """A penalty on an input's gradient, and one on weights', while other outputs live: the second
    pass asks for weights, too.
    """
    out, high, low = net(x)
    weights = [*getattr(net, "module", net).parameters()]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = grad.square().sum() + out.square().mean() + low.mean() + high.pow(2).mean()
    first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    total = torch.stack([one.square().sum() for one in first if one is not None]).sum()
    return *first, *torch.autograd.grad(total, weights, allow_unused=True)


def retained_twice(net: Any, x: Tensor) -> Found:
    """Through a graph of gradients."""
    out, _, low = net(x)
    low.retain_grad()
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (grad.square().sum() + out.sum() + low.sum()).backward()
    return (low.grad,)


def one_after_the_other(net: Any, x: Tensor) -> Found:
    """Of one graph."""
    out, high, low = net(x)
    first = torch.autograd.grad(out.square().sum(), low, retain_graph=True)
    high.square().sum().backward(inputs=[low], retain_graph=True)
    out.sum().backward()
    return *first, low.grad


@pytest.mark.parametrize(
    "take",
    [
        one_by_another,
        both,
        retained,
        only_the_lower,
        hooked,
        twice,
        with_weights,
        retained_twice,
        one_after_the_other,
    ],
)
@pytest.mark.parametrize("optimizer", ["here", "in the replica"])
def test_B15_an_output_is_differentiated_by_another(
    take: Callable[[Any, Tensor], Found], optimizer: str
) -> None:
    """The gradients of outputs, weights and inputs that the module itself has."""
    net, found = Chain(), []
    for wraps in (False, True):
        module = copy.deepcopy(net)
        runs: Any = DataParallel(module, ["cpu"]) if wraps else module
        steps = None
        if wraps and optimizer == "in the replica":
            if take in (twice, with_weights, retained_twice):
                pytest.skip("gradients of gradients stay with the driver")
            steps = runs.optimizer(torch.optim.SGD, lr=0.1)
        else:
            steps = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
        given = []
        for _ in range(2):
            given += [*take(runs, x)]
            if any(p.grad is not None for p in module.parameters()):
                steps.step()
        if hasattr(runs, "sync"):
            runs.sync()
        found.append([*given, x.grad, *module.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other.detach(), one.detach())


class Keeps(nn.Module):
    """Keeps its features, and has a hook on them: as modules do that explain themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.grads: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.first(x).tanh()
        self.features.register_hook(self.keep)
        self.features.retain_grad()
        return self.last(self.features)  # type: ignore[no-any-return]

    def keep(self, gradient: Tensor) -> None:
        """The hook."""
        self.grads.append(gradient)


def test_B15_features_that_attributes_and_hooks_keep() -> None:
    """They are outputs, too: a hook inside the module sees the whole gradient, once, and what asks
    inside the module for a gradient gets it.
    """
    plain, x = Keeps(), torch.linspace(-1, 1, 12).view(4, 3)
    net, kept = copy.deepcopy(plain), {}
    for module, runs in ((plain, plain), (net, DataParallel(net, ["cpu"]))):
        activations: dict[str, Tensor] = {}
        module.first.register_forward_hook(
            lambda _module, _args, out, activations=activations: activations.update(first=out)
        )
        for _ in range(2):
            out = runs(x)
            found = torch.autograd.grad(out[:, 0].sum(), activations["first"], retain_graph=True)
            assert len(module.grads) % 2 == 1
            out.square().sum().backward()
        assert len(module.grads) == 4
        kept[module] = [*found, module.features.grad, *module.grads]
    torch.testing.assert_close(kept[net], kept[plain])


class Normalises(nn.Module):
    """Hooks inside make of a gradient what they would not make of its parts; one of them changes
    that of an output.
    """

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.checkpoints, self.calls = checkpoints, 0
        self.last.register_full_backward_hook(self.count)

    def count(self, *_: Any) -> None:
        """A hook of a layer."""
        self.calls += 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.first(x).tanh()
        middle: Any
        if self.checkpoints:
            middle = checkpoint(self.second, low, use_reentrant=True)
        else:
            middle = self.second(low)
        if x.requires_grad:
            low.register_hook(lambda grad: grad * 2)
            middle.register_hook(lambda grad: grad / grad.norm())
        high = middle.tanh()
        return self.last(high), high, low


@pytest.mark.parametrize("way", ["input", "output", "retained", "retained and checkpointed"])
def test_B15_hooks_inside_see_whole_gradients_once(way: str) -> None:
    """A pass that asks for nothing inside is the one trip that it was."""
    plain, net = (Normalises(way.endswith("checkpointed")) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    found = []
    for module, runs in ((plain, plain), (net, DataParallel(net, ["cpu"]))):
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        for _ in range(2):
            out, high, low = runs(x)
            if way == "input":
                given = torch.autograd.grad(out.square().sum() + high.sum(), x)
            elif way == "output":
                given = torch.autograd.grad(out.square().sum(), [high, low])
            else:
                low.retain_grad()
                high.retain_grad()
                (out.square().sum() + high.sum()).backward()
                given = (low.grad, high.grad)
            found.append([*given, x.grad, module.first.weight.grad])
        assert module.calls == 2
    for one, other in zip(found[:2], found[2:], strict=True):
        assert [t is None for t in other] == [t is None for t in one]
        torch.testing.assert_close(*([t for t in row if t is not None] for row in (other, one)))


class Forces(nn.Module):
    """Gives an energy, and the positions that it made a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = x.detach().requires_grad_()
        return self.inner(positions).square().sum(), positions


def test_B15_a_leaf_that_forward_made_has_a_gradient() -> None:
    """Where it is asked for, as forces are by positions; here it is no leaf."""
    plain, x, found = Forces(), torch.ones(4, 3), []
    for runs in (plain, DataParallel(copy.deepcopy(plain), ["cpu"])):
        energy, positions = runs(x)
        found.append(torch.autograd.grad(energy, positions, retain_graph=True))
        energy.backward()
    torch.testing.assert_close(found[1], found[0])


def test_B15_a_second_derivative_by_an_output_is_refused() -> None:
    """It would lack a part: an error says so."""
    model, x = DataParallel(Chain(), ["cpu"]), torch.ones(4, 3, dtype=torch.float64)
    out, _, low = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), low, create_graph=True)
    with pytest.raises(RuntimeError, match="by an output of the module"):
        torch.autograd.grad(grad.square().sum(), low)


def test_B15_costs_a_trip_only_where_it_is_asked_for() -> None:
    """A loss and what it was computed from, as most models of libraries give them."""
    model, x = DataParallel(Chain(), ["cpu"]), torch.ones(4, 3, dtype=torch.float64)

    def trips() -> int:
        return model.executor.stats().backwards

    before = trips()
    model(x)[0].sum().backward()
    assert trips() - before == 1
    _, high, low = model(x)
    torch.autograd.grad(high.sum(), low)
    assert trips() - before == 2
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(high.sum(), low)
    low.sum().backward()
    assert trips() - before == 3
    x.requires_grad_()
    out, high, low = model(x)
    torch.autograd.grad(out.sum() + high.sum(), x, retain_graph=True)
    assert trips() - before == 4
    torch.autograd.grad(out.sum(), [high, low], retain_graph=True)
    assert trips() - before == 5
    low.retain_grad()
    out.sum().backward()
    assert trips() - before == 6


def test_B15_graphs_end_with_what_refers_to_them(two: Executor) -> None:
    """Without a reference cycle, also where only one output was differentiated by another."""
    model = DataParallel(Chain(), ["cpu"], executor=two)
    x = torch.ones(4, 3, dtype=torch.float64)
    model(x)
    gc.collect()
    gc.disable()
    try:
        before = two.flush()
        out, high, low = model(x)
        watched = weakref.ref(out)
        torch.autograd.grad(out.sum(), low, retain_graph=True)
        torch.autograd.grad(out.sum(), [high, low], create_graph=True)
        assert two.flush() != before
        del out, high, low
        assert watched() is None
        assert two.flush() == before
        out, high, low = model(x)
        torch.autograd.grad(out.sum(), [high, low])
        assert two.flush() != before  # `low` has one
        del out, high, low
        assert two.flush() == before
    finally:
        gc.enable()


def test_B15_gathered_outputs_are_not_computed_from_each_other() -> None:
    """With several devices, as upstream: torch says so."""
    model, x = DataParallel(Chain(), ["cpu"] * 2), torch.ones(4, 3, dtype=torch.float64)
    out, _, low = model(x)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out.sum(), low)
