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
        return self.last(high), high, low


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
    """A chosen output, the input, and the weights, to be differentiated again."""
    out, _, low = net(x)
    weights = [*getattr(net, "module", net).parameters()]
    found = torch.autograd.grad(out.square().sum(), [low, x, *weights], create_graph=True)
    torch.stack([one.square().sum() for one in found]).sum().backward()
    return found


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
            if take in (twice, with_weights):
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
            out.square().sum().backward()
        assert len(module.grads) == 4
        kept[module] = [*found, module.features.grad, *module.grads[1::2]]
    torch.testing.assert_close(kept[net], kept[plain])


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
