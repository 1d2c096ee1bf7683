"""The nets and batches that speed and memory are measured with, by name for other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp_parallel.check import nets


class Load(NamedTuple):
    """A net and its batch.

    Attributes:
        make: Makes the net.
        batch: Makes inputs and targets, on the CPU.
        loss: The loss of a net, wrapped or not, for a batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def vectors(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and classes."""
    x = torch.randn(rows, width, generator=_random())
    return x, torch.randint(10, (rows,), generator=_random())


def images(rows: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    x = torch.randn(rows, 3, size, size, generator=_random())
    return x, torch.randint(classes, (rows,), generator=_random())


def texts(rows: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    """Words, and the words that follow."""
    ids = torch.randint(words, (rows, length + 1), generator=_random())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def outside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed outside of the net."""
    return F.cross_entropy(net(x), y)


def inside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss computed inside the net, one number for each row."""
    loss: Tensor = net(x, y).mean()
    return loss


PERCEPTRON = "perceptron 2.1 M, batch 64"
RESNET = "ResNet-50, batch 64"
GPT2 = "GPT-2 small, batch 16 x 256"

LOADS = {
    PERCEPTRON: Load(lambda: nets.perceptron(1024, 1024, 10), lambda: vectors(64, 1024), outside),
    "tied transformer, batch 16": Load(nets.gpt, lambda: texts(16, 16, 48), inside),
    RESNET: Load(nets.resnet50, lambda: images(64, 224, 1000), outside),
    GPT2: Load(nets.gpt2_small, lambda: texts(16, 256, 50257), inside),
}


def stepper(load: Load, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A function that makes one step of training."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        load.loss(net, x, y).backward()
        optimizer.step()

    return step
