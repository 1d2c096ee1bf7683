"""The oracle is upstream's DataParallel, and leaves torch alone."""

import sys

import oracle
import pytest
import torch
from torch import nn


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def test_devices_are_checked():
    """A CPU device among the ids and a module elsewhere are refused (C3, F1)."""
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        oracle.DataParallel(_net(), ["cpu"])
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device"):
        oracle.DataParallel(_net().to("meta"), [0, 1])(torch.ones(2, 3))


@pytest.mark.upstream
def test_torch_is_left_alone():
    """Upstream's own modules still refuse CPU tensors, and none of their names is ours."""
    upstream = sys.modules["torch.nn.parallel._functions"]
    with pytest.raises((AssertionError, RuntimeError), match=r"CPU|cpu"):
        upstream.Gather.apply("cpu", 0, torch.ones(1, device="cpu"))
    assert nn.DataParallel is not oracle.DataParallel
    names = "_functions", "comm", "data_parallel", "parallel_apply", "replicate", "scatter_gather"
    for name in names:
        assert sys.modules[f"torch.nn.parallel.{name}"].__dict__.get("torch", torch) is torch
    assert torch._C is sys.modules["torch._C"]
    assert torch.accelerator.device_index is not oracle._no_context
