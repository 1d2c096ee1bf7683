"""The oracle is upstream's DataParallel, and leaves torch alone."""

import copy
import sys
import warnings

import oracle
import pytest
import torch
from torch import nn


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def _close(left, right):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("rows", [7, 2, 1])
def test_agrees_with_the_plain_module(rows):
    """Outputs, input gradients and parameter gradients are those of one module on the whole
    batch.
    """
    net, x = _net(), torch.randn(rows, 3, requires_grad=True)
    plain, y = copy.deepcopy(net), x.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, expected = oracle.DataParallel(net, [0, 1, 2])(x), plain(y)
        out.square().sum().backward()
    expected.square().sum().backward()
    assert _close([out, x.grad], [expected, y.grad])
    assert _close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_second_order():
    """Gradients of gradients agree with the plain module's."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3).double()

    def penalty(call):
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(inputs).sum(), inputs, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), list(net.parameters())[:3])

    assert _close(penalty(oracle.DataParallel(net, [0, 1])), penalty(net))


def test_devices_are_checked():
    """A CPU device among the ids and a module elsewhere are refused (C3, F1)."""
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        oracle.DataParallel(_net(), ["cpu"])
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device"):
        oracle.DataParallel(_net().to("meta"), [0, 1])(torch.ones(2, 3))


@pytest.mark.upstream
def test_complex_parameters_and_inputs():
    """Complex tensors cross all four steps."""
    net, x = nn.Linear(2, 2, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64)
    assert torch.allclose(oracle.DataParallel(net, [0, 1])(x), net(x))


@pytest.mark.upstream
def test_torch_is_left_alone():
    """Upstream's own modules still refuse CPU tensors, and none of their names is ours."""
    upstream = sys.modules["torch.nn.parallel._functions"]
    with pytest.raises((AssertionError, RuntimeError), match=r"CPU|cpu"):
        upstream.Gather.apply("cpu", 0, torch.ones(1))
    assert nn.DataParallel is not oracle.DataParallel
    names = "_functions", "comm", "data_parallel", "parallel_apply", "replicate", "scatter_gather"
    for name in names:
        assert sys.modules[f"torch.nn.parallel.{name}"].__dict__.get("torch", torch) is torch
    assert torch._C is sys.modules["torch._C"]
    assert torch.accelerator.device_index is not oracle._no_context
