"""Replicas in the driver's own process: the same clients without walls, and nothing of the driver's
is disturbed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options

HERE = Options(in_process=True)


def wrapped(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel[Any]:
    """A wrapper over replicas in this process."""
    return DataParallel(module, ["cpu"] * replicas, options=Options(in_process=True, **options))


class Draws(nn.Module):
    """Uses every generator, and changes settings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Random numbers of each kind."""
        noise = torch.rand(len(x), 1) + random.random() + float(np.random.rand())
        return x * self.weight + noise


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed() -> None:
    """Put the driver's generators where they always are."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def test_A10_the_drivers_generators_are_left_alone() -> None:
    """But for the one number that each forward draws from torch's for its seed."""
    seed()
    torch.empty((), dtype=torch.int64).random_()
    expected = draw()
    model = wrapped(Draws())
    seed()
    out = model(torch.ones(4, 1))
    assert draw() == expected
    out.sum().backward()
    after = draw()
    seed()
    torch.empty((), dtype=torch.int64).random_()
    draw()
    assert draw() == after


class Meddles(nn.Module):
    """Leaves modes behind, as code with a bug does."""

    def forward(self, x: Tensor) -> Tensor:
        """Grad mode and RNG."""
        torch.manual_seed(99)
        torch.set_grad_enabled(False)
        return x * 2


def test_modes_that_a_module_leaves_behind_stay_in_its_replica() -> None:
    """The driver goes on as it was, and so does the next call."""
    model = wrapped(Meddles())
    x = torch.ones(4, requires_grad=True)
    model(x)
    assert torch.is_grad_enabled()
    assert (x * 2).requires_grad


def test_replicas_say_that_they_are_here() -> None:
    """This process, as many as were asked for; closing ends them."""
    with Executor(["cpu"] * 3, options=HERE) as executor:
        replicas = executor.replicas()
        assert [(r.index, r.pid, r.state) for r in replicas] == [
            (i, os.getpid(), "ready") for i in range(3)
        ]
        model = DataParallel(nn.Linear(2, 2), executor=executor)
        model(torch.ones(3, 2))
    assert {r.state for r in executor.replicas()} == {"closed"}
