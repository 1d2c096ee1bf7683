"""Regressions that a reader found, each with its story."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, TransferError

pytestmark = pytest.mark.usefixtures("cluster")
TWO = ["cpu", "cpu"]


class Boom(torch.autograd.Function):
    """Raises in backward when told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise RuntimeError("boom")
        return grad, None


class Between(nn.Module):
    """Two layers, and between them something with a backward that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(2, 2), nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Boom.apply(self.a(x), self.fails))


def test_a_backward_that_failed_leaves_no_gradients() -> None:
    """What it had accumulated by then was added to the next one's."""
    net = Between()
    model, x = DataParallel(net, TWO), torch.ones(4, 2)
    net.fails = True
    with pytest.raises(RuntimeError, match="boom"):
        model(x).sum().backward()
    net.fails = False
    model.zero_grad()
    model(x).sum().backward()
    ours = net.b.weight.grad.clone()
    net.zero_grad()
    net(x).sum().backward()
    torch.testing.assert_close(ours, net.b.weight.grad)


class Scales(nn.Module):
    """Takes its own parameter as an argument too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * self.scale * scale


def test_a_parameter_that_is_an_input_too() -> None:
    """It stands twice among a chunk's leaves; one gradient was lost."""
    net, x = Scales(), torch.arange(4.0)
    DataParallel(net, TWO)(x, net.scale).sum().backward()
    ours = net.scale.grad.clone()
    net.scale.grad = None
    net(x, net.scale).sum().backward()
    torch.testing.assert_close(ours, net.scale.grad)


def test_a_failed_call_does_not_keep_the_model(executors: Any) -> None:
    """After an argument that cannot be sent, a dropped model stayed in its replicas."""
    executor = executors()
    gc.collect()
    model = DataParallel(nn.Linear(2, 2), executor=executor)
    known = weakref.ref(model.module)
    model(torch.ones(2, 2))
    with pytest.raises(TransferError):
        model(torch.ones(2, 2), (i for i in range(3)))
    del model
    assert known() is None
