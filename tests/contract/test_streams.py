"""Modules that hold the process's streams, and objects that ask another one."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
import torch
from harness import Apply
from torch import Tensor, nn
from tqdm import tqdm

from raydp_parallel import DataParallel

ONES = torch.ones(4, 2)


def holds(held: Any) -> nn.Module:
    """Holds what it is given, and says what of it is its process's own."""
    return Apply(lambda net, x: (x * 2, net.held in (sys.stdout, sys.stderr)), held=held)


def logs(net: Any, x: Tensor) -> tuple[Tensor, str]:
    """Uses a handler of its own."""
    own, net.handler.stream = net.handler.stream is sys.stderr, io.StringIO()
    net.handler.handle(logging.LogRecord("name", logging.INFO, "", 0, "seen", (), None))
    return x, f"{own} {net.handler.stream.getvalue().strip()}"


def advances(net: Any, x: Tensor) -> tuple[Tensor, int]:
    """Advances a bar that it was made with."""
    net.bar.update(2)
    return x, net.bar.n


class Proxy:
    """Asks another object for all that it has not; without one it asks itself, for ever."""

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


def uses(net: Any, x: Tensor) -> Tensor:
    """Computes with a proxy's, with what it stands for, and with a tensor in that."""
    return x * net.proxy.weight.sum() * net.slotted.factor + net.slotted.get("bias")


@pytest.mark.parametrize("name", ["stdout", "stderr", "__stdout__", "__stderr__"])
def test_a_replica_has_its_own_streams(name: str) -> None:
    """And the forward after it sends nothing again."""
    model = DataParallel(holds(getattr(sys, name)), ["cpu", "cpu"])
    out, own = model(ONES)
    assert torch.equal(out, ONES * 2)
    assert own == [True, True]
    before = model.executor.stats().state_sends
    model(ONES)
    assert model.executor.stats().state_sends == before


def test_handlers_and_bars() -> None:
    """They write to the replica's own stream; a bar is put back before the next forward."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(message)s]"))
    model = DataParallel(Apply(logs, handler=handler), ["cpu", "cpu"])
    assert model(ONES)[1] == ["True [seen]"] * 2
    bar = tqdm(total=100, file=sys.stdout, leave=False)
    model = DataParallel(Apply(advances, bar=bar), ["cpu", "cpu"])
    assert model(ONES)[1] == model(ONES)[1] == [2, 2]
    model.module.bar.close()


def test_objects_that_delegate() -> None:
    """In a module, and as an argument; their attributes and slots come along."""
    slotted = SlottedProxy({"bias": torch.full((2,), 5.0)}, 3.0)
    net = Apply(uses, proxy=Proxy(Proxy(nn.Linear(2, 2))), slotted=slotted)
    model = DataParallel(net, ["cpu", "cpu"])
    assert torch.equal(model(ONES), net(ONES))
    held = DataParallel(holds(None), ["cpu", "cpu"])
    held.module.forward = given
    assert torch.equal(held(ONES, SlottedProxy(Proxy({"a": 1}), 4.0)), ONES * 5)


def given(x: Tensor, proxy: Any) -> Tensor:
    """Asks an argument."""
    return x * (proxy.factor + proxy.get("a"))
