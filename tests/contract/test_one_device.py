"""One device of the driver's own: the module itself runs there, as upstream's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import made_of
from torch import Tensor, nn

import raydp_parallel


@made_of(inner=(3, 2), calls=0, history=[], seen={"rows": 0}, total=nn.Buffer(torch.zeros(2)))
def remembers(net: Any, x: Tensor) -> Tensor:
    """Rebinds a number, a buffer and an attribute with a graph, and appends to a list."""
    out = net.inner(x)
    net.calls += 1
    net.history.append(tuple(x.shape))
    net.seen["rows"] += len(x)
    net.total = net.total + out.detach().sum(0)
    net.penalty = out.square().mean()
    net.inner.last = len(x)
    return out  # type: ignore[no-any-return]


def test_F5_in_place_is_the_module_s_own_call() -> None:
    """The very objects go in and come out, without a replica; an optimizer is the plain one."""
    model = raydp_parallel.DataParallel(nn.Identity(), ["cpu"])
    thing = object()
    assert model(thing) is thing
    assert "in place" in repr(model) and "in place" in str(model.stats())
    kept = raydp_parallel.DataParallel(remembers(), ["cpu"])
    for _ in range(2):
        (kept(torch.ones(4, 3)).sum() + kept.module.penalty).backward()
    assert kept.module.calls == 2 and kept.module.history == [(4, 3)] * 2
    assert "total" in dict(kept.module.named_buffers()) and kept.module.total.any()
    net = nn.Linear(3, 2)
    wrapper = raydp_parallel.DataParallel(net, ["cpu"])
    optimizer = wrapper.optimizer(torch.optim.SGD, lr=0.1)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"] == [*net.parameters()]
    wrapper.no_sync()(lambda: wrapper(torch.ones(2, 3)).sum().backward())()
    assert net.weight.grad is not None


def test_X7_no_sync_is_a_null_context(two: raydp_parallel.Executor) -> None:
    """Gradients are there at any time, and are those of both backwards."""
    net = nn.Linear(3, 2)
    plain, model = copy.deepcopy(net), raydp_parallel.DataParallel(net, executor=two)
    x = torch.randn(4, 3)
    with model.no_sync():
        model(x).sum().backward()
        assert net.weight.grad is not None
    model(2 * x).sum().backward()
    (plain(x).sum() + plain(2 * x).sum()).backward()
    torch.testing.assert_close(net.weight.grad, plain.weight.grad)


@pytest.mark.parametrize(("ids", "rows"), [(["cpu", "cpu"], 1), (["cpu"], 4)])
def test_F5_F6_what_a_replica_sets_is_lost(
    ids: list[str], rows: int, two: raydp_parallel.Executor
) -> None:
    """Also of one chunk; one device is a replica if it has an executor."""
    net = remembers()
    raydp_parallel.DataParallel(net, ids, executor=two)(torch.ones(rows, 3))
    assert net.calls == 0 and net.history == [] and not hasattr(net, "penalty")
