"""Steps of growing length, with the wrapper and without it: rows of `benchmarks.house`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import interleaved
from benchmarks.nets import perceptron, vectors
from benchmarks.peers import sgd

WIDTHS = (64, 256, 512, 1024, 2048)
WAITS = (2, 5, 10, 20, 50, 100)
REPLICAS = (2, 4)
ROUNDS = 9


def sizes() -> dict[str, float]:
    """Milliseconds of a training step of MLPs, plain and on two CPU replicas."""
    found = {}
    for width in WIDTHS:
        x, y = vectors(width, 256)
        turns = {}
        for name in ("plain", "2 replicas"):
            net = perceptron(width)
            model = net if name == "plain" else raydp_parallel.DataParallel(net, ["cpu"] * 2)
            turns[name] = _step(model, x, lambda out, y=y: nn.functional.cross_entropy(out, y))
        for name, ms in interleaved(turns, ROUNDS).items():
            found[f"MLP of width {width}, {name}: ms"] = ms
    return found


def speed_up() -> dict[str, float]:
    """How many times faster a step is on devices that share no cores: here they only wait, half of
    the plain step's time in forward and half in backward, each as long as its rows take.
    """
    found = {}
    rows = 64
    for ms in WAITS:
        turns = {}
        for count in (0, *REPLICAS):
            net = Waiting(ms / 2000 / rows)
            model = raydp_parallel.DataParallel(net, ["cpu"] * count) if count else net
            turns[count] = _step(model, torch.randn(rows, 16), Tensor.sum)
        medians = interleaved({str(count): turn for count, turn in turns.items()}, ROUNDS)
        for count in REPLICAS:
            found[f"plain step of {ms} ms, {count} replicas: speed-up"] = (
                medians["0"] / medians[str(count)]
            )
    return found


def _step(model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    optimizer = sgd(model)

    def step() -> None:
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Waiting(nn.Module):
    """A net that takes a given time for each row, and no core.

    Args:
        seconds: For each row, in each direction.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and compute next to nothing."""
        waited: Tensor = _Wait.apply(self.layer(x), self.seconds)
        return waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(len(x) * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(len(grad) * ctx.seconds)
        return grad, None
