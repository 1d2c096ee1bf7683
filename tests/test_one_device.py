"""One device: upstream runs the master itself there, and what its forward does to it stays."""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import raydp_parallel

pytestmark = pytest.mark.usefixtures("cluster")


class Remembers(nn.Module):
    """Rebinds a number, a buffer and an attribute with a graph, and appends to a list, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.calls = 0
        self.history: list[Any] = []
        self.seen = {"rows": 0}
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.calls += 1
        self.history.append(tuple(x.shape))
        self.seen["rows"] += len(x)
        self.total = self.total + out.detach().sum(0)
        self.penalty = out.square().mean()
        self.inner.last = len(x)
        return out


def run(wrapper: Any) -> Any:
    """Three forwards, each with a loss that uses an attribute."""
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(3):
        (wrapper(x).sum() + wrapper.module.penalty).backward()
    return wrapper.module


def test_F5_what_forward_rebinds_stays() -> None:
    """Counters, lists, dicts, buffers and losses kept as attributes are the master's afterwards, gradients included."""
    net = Remembers()
    theirs = run(oracle.DataParallel(copy.deepcopy(net), [0]))
    ours = run(raydp_parallel.DataParallel(net, ["cpu"]))
    assert ours.calls == theirs.calls == 3
    assert ours.history == theirs.history == [(4, 3)] * 3
    assert ours.seen == theirs.seen == {"rows": 12}
    assert ours.inner.last == theirs.inner.last == 4
    torch.testing.assert_close(ours.total, theirs.total)
    torch.testing.assert_close(ours.inner.weight.grad, theirs.inner.weight.grad)
    assert "total" in dict(ours.named_buffers())


def test_F6_with_two_devices_it_is_lost() -> None:
    """Also when there is one chunk only."""
    wrapper = raydp_parallel.DataParallel(Remembers(), ["cpu", "cpu"])
    wrapper(torch.ones(1, 3))
    assert wrapper.module.calls == 0
    assert wrapper.module.history == []
    assert not hasattr(wrapper.module, "penalty")
