"""Training in the replicas where programs do more than `step`: options that a step changes, edits
in the driver, other wrappers, and the end of things. Replicas run in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from raydp_parallel import DataParallel, Executor, Options

HERE = Options(in_process=True, threads=1)


@pytest.fixture
def two() -> Iterator[Executor]:
    """Two replicas."""
    with Executor(["cpu"] * 2, options=HERE) as executor:
        yield executor


def small(
    executor: Executor, inside: bool = True, kind: Any = torch.optim.Adam, **keywords: Any
) -> tuple[DataParallel[Any], Any]:
    """A small model and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DataParallel(net, executor=executor)
    keywords = {"lr": 0.01, **keywords}
    if inside:
        return model, model.optimizer(kind, **keywords)
    return model, kind(net.parameters(), **keywords)


def advance(model: DataParallel[Any], optimizer: Any, step: int) -> None:
    """One step of training."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()


def same(found: Any, expected: Any) -> bool:
    """Whether two models have the same weights."""
    pairs = zip(found._master.parameters(), expected._master.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


# --- options that a step changes ---


class Counting(torch.optim.SGD):
    """Its groups have a counter, and a learning rate that follows from it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"], group["seen"] = 0, [0]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = [*group["seen"], group["k"]]
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_T3_counters_in_the_groups(two: Executor) -> None:
    """They count on in the replicas, arrive with a sync, and leave the driver's edits alone."""
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside, Counting, lr=0.1)
        for step in range(3):
            advance(model, optimizer, step)
        optimizer.param_groups[0]["lr"] = 0.05
        states = [optimizer.state_dict()["param_groups"]]
        advance(model, optimizer, 3)
        states += [optimizer.state_dict()["param_groups"]]
        assert optimizer.param_groups[0]["k"] == 4
        optimizer.param_groups[0]["k"] = 1
        advance(model, optimizer, 4)
        optimizer.load_state_dict(optimizer.state_dict())
        advance(model, optimizer, 5)
        states += [optimizer.state_dict()["param_groups"]]
        found.append((model.state_dict(), states))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])
