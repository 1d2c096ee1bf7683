"""Modules that end their processes at a chosen moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm


def arm(folder: Path, *moments: str) -> None:
    """Let processes end: ``"forward 1"`` names the next one that runs forward of chunk 1."""
    for moment in moments:
        number = len(list(folder.glob(f"{moment} *")))
        (folder / f"{moment} {number}").touch()


def armed(folder: Path) -> list[str]:
    """What has not come about."""
    return sorted(path.name for path in folder.iterdir())


def fate(folder: str, moment: str) -> None:
    """End this process, if that was asked for, or let its GPU be full; each file is one time."""
    for name in sorted(os.listdir(folder)):
        if name.startswith(f"{moment} "):
            os.unlink(os.path.join(folder, name))
            if moment.startswith("full "):
                raise torch.OutOfMemoryError("CUDA out of memory")
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal arrives


class Mortal(nn.Module):
    """Runs a module on rows of which the first column says which chunk they are; its process may
    end before that, or in backward.

    Args:
        body: The module.
        folder: Where `arm` leaves word.
    """

    def __init__(self, body: nn.Module, folder: Path) -> None:
        super().__init__()
        self.body = body
        self.folder = str(folder)

    def forward(self, x: Tensor) -> Tensor:
        chunk = int(x[0, 0])
        fate(self.folder, f"forward {chunk}")
        out: Tensor = self.body(x[:, 1:])
        if out.requires_grad:
            out.register_hook(lambda grad: fate(self.folder, f"backward {chunk}"))
        return out


class Everything(nn.Module):
    """Dropout, batch norm, spectral norm, and a counter in a buffer with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh())
        self.norm = nn.BatchNorm1d(8)
        self.outer = spectral_norm(nn.Linear(8, 3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4)[::2])

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        h = self.norm(self.inner(x)).tanh()
        out: Tensor = self.outer(torch.dropout(h, 0.4, self.training))
        return out * (1 + self.seen.sigmoid().sum())


def rows(chunks: int, step: int, each: int = 4) -> Tensor:
    """A batch; the first column says which chunk a row will be in."""
    generator = torch.Generator().manual_seed(step)
    number = torch.arange(chunks).repeat_interleave(each).unsqueeze(1)
    return torch.cat([number, torch.randn(chunks * each, 6, generator=generator)], 1)


def state(model: nn.Module) -> list[Tensor]:
    """Weights, buffers, gradients and the driver's generator."""
    tensors = [*model.parameters(), *model.buffers()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [
        *(t.detach().clone() for t in tensors),
        *(g.clone() for g in grads),
        torch.get_rng_state(),
    ]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """To the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    """One training step."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
