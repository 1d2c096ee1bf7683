"""Modules that hold the process's streams, and objects with a `__getattr__` that asks another
object.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from raydp_parallel import DataParallel

ONES = torch.ones(4, 2)


class Holds(nn.Module):
    """Holds what it is given, and says what of it is its process's own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return x * 2, self.held is sys.stdout or self.held is sys.stderr


class Logs(nn.Module):
    """Has a handler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = logging.StreamHandler(sys.stderr)
        self.handler.setFormatter(logging.Formatter("[%(message)s]"))

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        own, self.handler.stream = self.handler.stream is sys.stderr, io.StringIO()
        self.handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "seen", (), None))
        return x, f"{own} {self.handler.stream.getvalue().strip()}"


class Bar(nn.Module):
    """Advances a bar that it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = tqdm(total=100, file=sys.stdout, leave=False)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.bar.update(2)
        return x, self.bar.n


class Proxy:
    """Asks another object for all that it has not; without one it asks itself for that, for
    ever.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SlottedProxy(Proxy):
    """The same, with a slot besides, and its own opinion on what may be set."""

    __slots__ = ("factor",)

    def __init__(self, inner: Any, factor: float) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "factor", factor)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Uses(nn.Module):
    """Computes with a proxy's, with what it stands for, and with a tensor in that."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(2, 2)
        self.proxy = Proxy(Proxy(inner))
        self.slotted = SlottedProxy({"bias": torch.full((2,), 5.0)}, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.proxy.weight.sum() * self.slotted.factor + self.slotted.get("bias")


@pytest.mark.parametrize("name", ["stdout", "stderr", "__stdout__", "__stderr__"])
def test_a_replica_has_its_own_streams(name: str) -> None:
    """Also that of before another was put in its place; and the forward after it sends nothing
    again.
    """
    model = DataParallel(Holds(getattr(sys, name)), ["cpu", "cpu"])
    out, own = model(ONES)
    assert torch.equal(out, ONES * 2)
    assert own == [True, True]
    before = model.executor.stats().state_sends
    model(ONES)
    assert model.executor.stats().state_sends == before


def test_handlers_and_bars() -> None:
    """A handler writes to the replica's own stream; a bar counts, and is put back before the next
    forward.
    """
    assert DataParallel(Logs(), ["cpu", "cpu"])(ONES)[1] == ["True [seen]"] * 2
    model = DataParallel(Bar(), ["cpu", "cpu"])
    assert model(ONES)[1] == model(ONES)[1] == [2, 2]
    model.module.bar.close()


def test_objects_that_delegate() -> None:
    """In a module, and as an argument; their attributes and slots come along."""
    net = Uses()
    model = DataParallel(net, ["cpu", "cpu"])
    assert torch.equal(model(ONES), net(ONES))
    held = DataParallel(Holds(None), ["cpu", "cpu"])
    held.module.forward = given
    assert torch.equal(held(ONES, SlottedProxy(Proxy({"a": 1}), 4.0)), ONES * 5)


def given(x: Tensor, proxy: Any) -> Tensor:
    """Asks an argument."""
    return x * (proxy.factor + proxy.get("a"))
