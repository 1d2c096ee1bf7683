"""The oracle is upstream's DataParallel, and leaves torch alone."""

import sys

import oracle
import pytest
import torch
from torch import nn


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
