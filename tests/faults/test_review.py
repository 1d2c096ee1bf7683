"""Regressions that a reader found, each with its story."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from harness import Apply
from torch import Tensor, nn

from raydp_parallel import DataParallel, TransferError

TWO = ["cpu", "cpu"]


def test_a_parameter_that_is_an_input_too() -> None:
    """It stands three times among a chunk's leaves; one gradient was lost."""
    scale, x = nn.Parameter(torch.tensor(2.0)), torch.arange(4.0)
    net = Apply(lambda net, x, one, other: x * net.scale * one * other.exp(), scale=scale)
    DataParallel(net, TWO)(x, net.scale, net.scale).sum().backward()
    ours = net.scale.grad.clone()
    net.scale.grad = None
    net(x, net.scale, net.scale).sum().backward()
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


class Parts:
    """An output of which a program gets each chunk's tensor."""

    def __init__(self, out: Tensor) -> None:
        self.out = out

    @staticmethod
    def __gather__(chunks: list[Parts], _device: Any, _dim: int) -> list[Tensor]:
        return [chunk.out for chunk in chunks]


def test_a_failed_pass_does_not_keep_the_graph(executors: Any) -> None:
    """With ``create_graph`` one that failed before all outputs had their gradients kept it."""
    executor = executors()
    gc.collect()
    before = executor.flush()
    x = torch.ones(2, 2, requires_grad=True)
    first, second = DataParallel(Apply(lambda net, x: Parts(x * 2)), executor=executor)(x)
    first.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad((first + second.square()).sum(), x, create_graph=True)
    del first, second
    torch.ones((), requires_grad=True).backward()  # torch drops what it still had to do
    gc.collect()
    assert executor.flush() == before
