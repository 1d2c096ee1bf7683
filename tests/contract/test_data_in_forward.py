"""`self.x.data = ...` in forward is kept where upstream's replica 0 holds the master's own tensor,
and lost elsewhere: it is kept for every buffer that needs no gradient, and under no_grad for every
parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same_state, made_of, raised, trio
from random_nets import Checkpointed
from torch import Tensor, nn
from torch.ao import quantization


class Replaces(nn.Module):
    """Replaces the data of what it is told in each forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), 0.5))
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("matrix", torch.arange(6.0).view(2, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("slope", torch.ones(3, requires_grad=True))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        exec(WAYS[self.how], {"net": self, "x": x.detach(), "torch": torch, "raised": raised})
        out = x @ self.weight * self.frozen * self.slope + self.mean + self.matrix.sum()
        return out + self.empty.sum()  # type: ignore[no-any-return]


WAYS = {
    "buffer": "net.mean.data = net.mean.data + x.mean(0)",
    "parameter": "net.weight.data = net.weight.data * 0.9 + x.mean()",
    "frozen": "net.frozen.data = net.frozen * 0.5",
    "buffer with gradient": "net.slope.data = net.slope.data * 0.5",
    "transposed": "net.matrix.data = net.matrix.data.t()",
    "part": "net.matrix.data = net.matrix.data[:, 1:] if net.matrix.numel() > 4 else x[:2, :2]",
    "grows": "net.empty.data = torch.cat([net.empty.data, x[0]])",
    "shrinks": "net.empty.data = torch.zeros(0)",
    "dtype": "net.mean.data = net.mean.data.double() + 1",
    "set_": "net.mean.set_(net.mean + x.mean(0))",
    "resize_": "net.matrix.resize_(3, 3).fill_(2)",
    "resize_ by far": "net.matrix.resize_(9, 9).fill_(2)",
    "resize_ of nothing": "net.empty.resize_(3).fill_(2)",
    "out": "torch.mul(x[0], 2, out=net.empty)",
    "past its end": "raised(lambda: torch.as_strided(net.mean, (9,), (1,), 0).sum())",
    "no change": "net.mean.data = net.mean.data.clone()",
    "both": "net.mean.data = net.mean.data + x.mean(0); net.matrix.add_(1); net.mean.mul_(2)",
    "written first": "net.mean.add_(5); net.mean.data = x.mean(0)",
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", WAYS)
def test_R6_replaced_data_stays_where_upstream_keeps_it(how: str, grad: bool) -> None:
    """Outputs, state, shapes and gradients after each forward; the last is in another mode."""
    ours, theirs, _ = trio(Replaces(how), 2)
    for number in range(4):
        with torch.set_grad_enabled(grad != (number == 3)):
            x = torch.randn(4, 3)
            outs = [model(x) for model in (ours, theirs)]
            torch.testing.assert_close(*outs)
            assert_same_state(ours, theirs)
            if outs[0].requires_grad:
                for out in outs:
                    out.sum().backward()
                for name, parameter in ours.named_parameters():
                    torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad)
                torch.testing.assert_close(ours.module.slope.grad, theirs.module.slope.grad)


def test_R6_torch_s_observers_resize_their_buffers() -> None:
    """A net that is prepared for training with quantization, and one that looks at channels."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
    net.qconfig = quantization.get_default_qat_qconfig("x86")
    ours, theirs, _ = trio(
        nn.Sequential(quantization.prepare_qat(net), quantization.PerChannelMinMaxObserver()), 2
    )
    for x in torch.randn(3, 4, 3):
        torch.testing.assert_close(ours(x), theirs(x))
        assert_same_state(ours, theirs)


@made_of(layer=(3, 3), seen=nn.Buffer(torch.zeros(20_000)))
def counting(net: Any, x: Tensor) -> Tensor:
    """Counts its calls in a buffer that is no small one, and then looks at it."""
    net.seen.add_(1)
    return net.layer(x).tanh() * net.seen.data[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: Replaces("buffer"), counting])
@pytest.mark.parametrize("reentrant", [True, False])
def test_B10_replaced_in_a_checkpoint(reentrant: bool, make: Callable[[], nn.Module]) -> None:
    """It is replaced twice per step, as upstream. What a buffer was when it was looked at is not
    what it was before it was written to.
    """
    ours, theirs, _ = trio(Checkpointed(make(), reentrant), 2)
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        for model in (ours, theirs):
            model(x).square().sum().backward()
        assert_same_state(ours, theirs)
