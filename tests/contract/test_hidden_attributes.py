"""Attributes that forward sets before it reads them: with one device they come back, and replicas
do without them (F5).
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mortal import whole
from torch import Tensor, nn

from raydp_parallel import DataParallel, StateChanged
from raydp_parallel.calls.executor import Executor
from raydp_parallel.state import structure
from raydp_parallel.state.hidden_attributes import HiddenAttributes

pytestmark = pytest.mark.usefixtures("cluster")


class Autoencoder(nn.Module):
    """Keeps the means and variances of its last rows, of which the program makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(3, 4), nn.Linear(2, 3)
        self.mu: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.mu, self.log_var = self.down(x).chunk(2, 1)
        self.noise = torch.randn_like(self.mu) * 0
        return self.up(self.mu + self.noise * self.log_var.exp())  # type: ignore[no-any-return]


def test_F5_what_forward_sets_first_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but weights travels, and training is that of the module itself."""
    dumps: list[int] = []
    dump = structure.dump
    monkeypatch.setattr(structure, "dump", lambda *args: dumps.append(len(sent)) or dump(*args))
    plain, x = Autoencoder(), torch.linspace(-1, 1, 12).view(4, 3)
    net, weights = copy.deepcopy(plain), []
    model = DataParallel(net, ["cpu"])
    sent = []
    for module, runs in ((plain, plain), (net, model)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = (runs(x) - x).square().sum()
            assert module.mu.grad_fn is not None
            (loss + module.mu.square().sum() + module.log_var.exp().sum()).backward()
            optimizer.step()
            if runs is model:
                sent.append(model.executor.stats().state_bytes)
        weights.append([*module.parameters()])
    torch.testing.assert_close(weights[1], weights[0])
    assert max(dumps) == 2  # once both forwards that came before set it
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert steps[-2] == steps[-1] == sum(4 * p.numel() for p in net.parameters())


class Remembers(nn.Module):
    """Computes with what the forward before kept, which it looks for in some way."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.look = look
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        if self.calls > 2:
            last = self.look(self)
            out = out if last is None else out + last
        self.kept = out.detach()
        return out


class LooksItself(Remembers):
    """As some code does."""

    @property
    def look_into_attributes(self) -> Any:
        """What it kept."""
        return self.__dict__.get("kept")


class HasDefault(Remembers):
    """Where an instance has none, its class has."""

    kept: Any = None


def swallows(net: Any) -> Any:
    """Whatever goes wrong."""
    try:
        return net.kept
    except:  # noqa: E722
        return None


WAYS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda net: net.kept,
    "default": lambda net: getattr(net, "kept", None),
    "hasattr": lambda net: net.kept if hasattr(net, "kept") else None,
    "swallowed": swallows,
    "dict": lambda net: vars(net)["kept"],
    "property": lambda net: net.look_into_attributes,
    "class": lambda net: net.kept,
}
KINDS: dict[str, type[Remembers]] = {"property": LooksItself, "class": HasDefault}


@pytest.mark.parametrize("way", WAYS)
def test_F5_what_forward_reads_is_shown(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it looks for it: the forward runs again with it, or it was not hidden."""
    shown: list[bool] = []
    show = HiddenAttributes.show
    monkeypatch.setattr(
        HiddenAttributes, "show", lambda self: shown.append(show(self)) or shown[-1]
    )
    plain = KINDS.get(way, Remembers)(WAYS[way])
    net, x = copy.deepcopy(plain), torch.linspace(-1, 1, 12).view(4, 3)
    model = DataParallel(net, ["cpu"])
    for number in range(6):
        if number == 4:
            plain.kept, net.kept = torch.ones(4, 3), torch.ones(4, 3)
        ours, theirs = model(x), plain(x)
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    assert any(shown) == (way not in KINDS)
    assert net.calls == 6
    torch.testing.assert_close(net.kept, plain.kept)
    torch.testing.assert_close(net.inner.weight.grad, plain.inner.weight.grad)


def test_F5_calls_in_flight_that_miss_one_all_run_again(two: Executor) -> None:
    """Of `map`, whose batches begin before the first is told that it lacks something."""

    class Trains(nn.Module):
        """Reads in evaluation what training kept."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            if self.training:
                self.kept = out.detach()
                return out
            return out + self.kept

    plain, x = Trains(), torch.linspace(-1, 1, 12).view(4, 3)
    net = copy.deepcopy(plain)
    model = DataParallel(net, ["cpu"], executor=two)
    for _ in range(3):
        model(x), plain(x)
    net.eval()
    plain.eval()
    for out in model.map([x] * 6):
        torch.testing.assert_close(out, plain(x).detach())


def test_F5_parts_and_other_devices_are_shown_too(two: Executor) -> None:
    """What one layer keeps another one reads; and what a call on one device set, a call on two."""

    class Pair(nn.Module):
        """The second layer adds what the first one kept in the forward before."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Autoencoder(), nn.Linear(3, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            extra = self.first.mu.sum().detach() if self.calls > 3 else 0
            return self.second(self.first(x)) + extra  # type: ignore[no-any-return]

    plain, x = Pair(), torch.linspace(-1, 1, 12).view(4, 3)
    net = copy.deepcopy(plain)
    model = DataParallel(net, ["cpu"] * 2, executor=two)
    for _ in range(5):
        torch.testing.assert_close(model.call("forward", x, split=False), plain(x))
    torch.testing.assert_close(model(x), plain(x))


class Explains(nn.Module):
    """A hook in backward reads what forward kept, which only training does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if self.training:
            self.activation = out.detach()
        if out.requires_grad:
            out.register_hook(self.weigh)
        return self.last(out)  # type: ignore[no-any-return]

    def weigh(self, gradient: Tensor) -> None:
        """A map of a class."""
        self.map = self.activation * gradient


def test_F5_hooks_in_backward_find_what_a_forward_set() -> None:
    """Of this forward, or of an earlier one."""
    plain, x = Explains(), torch.linspace(-1, 1, 12).view(4, 3)
    net = copy.deepcopy(plain)
    model = DataParallel(net, ["cpu"])
    for number in range(5):
        maps = []
        for module, runs in ((plain, plain), (net, model)):
            out = runs(x)
            if number == 3:
                module.eval()
                runs(2 * x)
                module.train()
            out.square().sum().backward()
            maps.append(module.map)
        torch.testing.assert_close(maps[1], maps[0])


class MakesOnce(Explains):
    """Makes a mask in the first forward, which only a hook in backward reads."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask, self.norms = torch.ones(4) * 2, [1.0]
        return super().forward(x)

    def weigh(self, gradient: Tensor) -> Tensor:
        """With the mask."""
        self.norms.append(gradient.norm().item())
        return gradient * self.mask


def test_F5_what_one_forward_made_hooks_find() -> None:
    """It is not hidden, as no other forward makes it again."""
    plain, x = MakesOnce(), torch.linspace(-1, 1, 12).view(4, 3)
    net = copy.deepcopy(plain)
    model = DataParallel(net, ["cpu"])
    for _ in range(4):
        for runs in (plain, model):
            runs(x).square().sum().backward()
        torch.testing.assert_close(net.inner.weight.grad, plain.inner.weight.grad)
    assert net.norms == pytest.approx(plain.norms)


def test_F5_what_only_an_earlier_structure_had_is_told() -> None:
    """A backward cannot run again by itself: the next forward shows it."""
    net, x = Explains(), torch.ones(4, 3)
    model = DataParallel(net, ["cpu"])
    for _ in range(3):
        model(x).sum().backward()
    net.eval()
    net.extra = [1]
    loss = model(x).sum()
    with pytest.raises(StateChanged, match="run forward again"):
        loss.backward()
    model(x).sum().backward()
    torch.testing.assert_close(net.map, net.activation * net.last.weight.sum(0))


def test_F5_a_new_replica_does_without_them(killable: Executor) -> None:
    """After a death, before the backward too: the graph is made again."""
    net, x, found = Autoencoder(), torch.linspace(-1, 1, 12).view(4, 3), []
    for dies in (False, True):
        module = copy.deepcopy(net)
        model = DataParallel(module, ["cpu"], executor=whole(killable))
        for number in range(4):
            out = model(x)
            if dies and number == 2:
                os.kill(killable.replicas()[0].pid, signal.SIGKILL)
            (out.square().sum() + module.mu.sum()).backward()
        found.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(found[1], found[0])
