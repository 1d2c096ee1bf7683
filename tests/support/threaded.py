"""Several threads at once, and a net with outputs that tell calls apart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def together(*works: Callable[[], Any]) -> None:
    """Run some functions, each in a thread of its own, and raise what one of them raised."""
    failed: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


class Scaled(nn.Module):
    """Large outputs, and as large a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
