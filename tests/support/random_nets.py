"""Random nets, each a function of its seed.

Nothing is drawn from torch's default generator but in `made`, which seeds it: wrappers draw from
it, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Residual(nn.Module):
    """Adds what its block gives."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Branches(nn.Module):
    """A list and a dict of blocks; their outputs are added."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.many, self.named = nn.ModuleList(blocks[1:]), nn.ModuleDict({"first": blocks[0]})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.named["first"](x)
        for block in self.many:
            out = out + block(x)
        return out


class Twice(nn.Module):
    """Uses one block two times; or ties the weights of two layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.two.weight = self.one.weight
        else:
            self.two = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class Checkpointed(nn.Module):
    """Computes its block again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Clipped(nn.Module):
    """A hook on the tensor between its layers, that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.2, 0.2) + grad.pow(2))
        return self.two(hidden)


class Running(nn.Module):
    """A buffer and a counter that forward writes to; the buffer also through ``.data``."""

    mean: Tensor
    calls: Tensor

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.raw = raw
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.detach().mean(0)
            if self.raw:
                self.mean.data.mul_(0.5).add_(0.5 * now)
            else:
                self.mean.mul_(0.5).add_(0.5 * now)
            self.calls += 1
        return x - self.mean.clone()


class Growing(nn.Module):
    """A buffer that has more rows, or fewer, after each forward."""

    rows: Tensor

    def __init__(self, resized: bool) -> None:
        super().__init__()
        self.resized = resized
        self.register_buffer("rows", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # the buffer is no tensor of that mode
            if self.training and len(self.rows) > 2:
                self.rows.data = self.rows.data[2:]
            elif self.training and self.resized:
                self.rows.resize_(len(self.rows) + 1, WIDTH)[-1] = x.detach().mean(0)
            elif self.training:
                self.rows.data = torch.cat([self.rows, x.detach().mean(0, keepdim=True)])
        return x - self.rows.sum(0)


class Sometimes(nn.Module):
    """Uses one layer, another one, or none, as the first row says."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        used = [
            layer for layer, number in zip((self.one, self.two), x[0], strict=False) if number > 0
        ]
        return used[0](x) if used else x


class Words(nn.Module):
    """A table with sparse gradients; as the first row says, with dense ones, or with none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, nn.Embedding(WIDTH + 1, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach() > 0).sum(1)
        if self.how == "sparse" or x[0, 0] > 0:
            return x + self.table(ids)
        return x + self.table.weight[ids] if self.how == "dense" else x


INEXACT = Twice, Words, parametrizations._SpectralNorm
"""Modules that use a weight more than once: the sum of its gradients has another order."""


def scale_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output * 1.25


def shift_input(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before forward."""
    return (args[0] + 0.5,)


def squash_grad(_module: nn.Module, grads: Any, _outputs: Any) -> Any:
    """A full backward hook."""
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def block(draw: random.Random, depth: int) -> nn.Module:
    """A module that keeps the width."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7),
        "activation": lambda: draw.choice((nn.Tanh, nn.Softplus, nn.GELU))(),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "twice": lambda: Twice(draw.random() < 0.5),
        "clipped": Clipped,
        "running": lambda: Running(draw.random() < 0.5),
        "growing": lambda: Growing(draw.random() < 0.5),
        "sometimes": Sometimes,
        "words": lambda: Words(draw.choice(("sparse", "dense", "none"))),
        "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    }
    deep: dict[str, Callable[[], nn.Module]] = {
        "sequence": lambda: nn.Sequential(*blocks()),
        "residual": lambda: Residual(block(draw, depth - 1)),
        "branches": lambda: Branches(blocks()),
        "checkpoint": lambda: Checkpointed(block(draw, depth - 1), reentrant=False),
    }

    def blocks() -> list[nn.Module]:
        return [block(draw, depth - 1) for _ in range(draw.randrange(1, 4))]

    names = (*kinds, *((*deep, "checkpoint") * 2 if depth else ()))
    found = (kinds | deep)[draw.choice(names)]()
    if isinstance(found, Checkpointed) and [*found.buffers()]:
        found = found.block  # the plain module's would be written again by each chunk's backward
    hook = draw.randrange(12)
    if hook == 0:
        found.register_forward_hook(scale_output)
    elif hook == 1:
        found.register_forward_pre_hook(shift_input)
    elif hook == 2:
        found.register_full_backward_hook(squash_grad)
    return found


def made(draw: random.Random, make: Callable[[], Any]) -> Any:
    """What draws from torch's generator, the same for both wrappers."""
    torch.manual_seed(draw.randrange(1 << 30))
    return make()
