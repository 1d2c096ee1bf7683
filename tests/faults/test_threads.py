"""Several threads that use one executor: each gets what it asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel


class Scaled(nn.Module):
    """Large outputs, and as large a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_threads_get_their_own_outputs_and_gradients(executors: Any) -> None:
    """The calls of one are answered while the answers of another are read."""
    size = 1 << 20
    model = DataParallel(Scaled(size), ["cpu"], executor=executors())
    model(torch.ones(1, size))

    def ask(number: int) -> None:
        for _ in range(6):
            x = torch.full((1, size), float(number), requires_grad=True)
            out = model(x)
            assert out.unique().tolist() == [number]
            (slope,) = torch.autograd.grad(out.sum() * number, x)
            assert slope.unique().tolist() == [number]

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(ask, (2, 3, 5))] == [None] * 3
