"""Regressions that a reader found, each with its story."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from harness import Apply
from torch import nn

from raydp_parallel import DataParallel, TransferError

TWO = ["cpu", "cpu"]


def test_a_parameter_that_is_an_input_too() -> None:
    """It stands twice among a chunk's leaves; one gradient was lost."""
    scale = nn.Parameter(torch.tensor(2.0))
    net, x = Apply(lambda net, x, scale: x * net.scale * scale, scale=scale), torch.arange(4.0)
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
