"""`Options(chunk_weights=...)`: chunks of chosen sizes (pytorch#34516, #46381, #35118, #18563)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import assert_same_grads, made_of
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options

TWO, THREE = ["cpu", "cpu"], ["cpu", "cpu", "cpu"]


@made_of(net=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
def net_of(net: Any, x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
    """Says how many rows it got."""
    return net.net(x) * scale, len(x)


def test_X2_counts_of_weights() -> None:
    """One for each device, also where ``device_ids`` are edited later; sizes follow."""
    options = Options(chunk_weights=[3, 1])  # type: ignore[arg-type]
    assert options.chunk_weights == (3, 1) and hash(options)
    with pytest.raises(ValueError, match=r"2 weights for 3 devices \['cpu', 'cpu', 'cpu'\]"):
        DataParallel(net_of(), THREE, options=options)
    model = DataParallel(net_of(), TWO, options=options)
    for rows, expected in ((8, [6, 2]), (3, [2, 1]), (2, [1, 1]), (1, [1])):
        assert model(torch.randn(rows, 4))[1] == expected
    model.device_ids = THREE
    with pytest.raises(ValueError, match="2 weights for 3 devices"):
        model(torch.randn(8, 4))


@pytest.mark.parametrize("weights", [(4, 1), (1, 4)])
def test_X2_gradients_are_those_of_the_even_split(two: Executor, weights: Any) -> None:
    """Of weights and inputs, of first and second order, with a method too; rows stay in order."""
    net = net_of().double()
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=Options(chunk_weights=weights))
    grads = []
    for one in (even, model):
        x = torch.linspace(-1, 1, 40, dtype=torch.double).view(10, 4).requires_grad_()
        out, rows = one(x, scale=2.0)
        assert rows == ([5, 5] if one is even else [2 * w for w in weights])
        torch.testing.assert_close(out, one.module(x, 2.0)[0])
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (out.mean() + slope.square().sum() + one.call("forward", x)[0].sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    assert_same_grads(model, even, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], even(x)[0])
        split = [len(out[0]) for out in model.call("forward", x, gather=False)]
        assert split == rows
