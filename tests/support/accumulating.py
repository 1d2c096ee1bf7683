"""Accumulated gradients: a small net, its backwards, and what its gradients are compared with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from mortal import arm, armed, rows
from torch import Tensor, nn

from raydp_parallel import Options
from raydp_parallel.calls.remote_gradients import RemoteGradient

HERE = Options(in_process=True)


def small() -> nn.Sequential:
    """A net in double precision, so that orders of additions hardly differ."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(seed: int, size: int = 6) -> Tensor:
    """Rows for it."""
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(model: nn.Module, x: Tensor, hold: bool = False) -> None:
    """One backward; its gradients stay in the replicas if ``hold``."""
    with model.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator]
        loss = model(x).square().sum()
    loss.backward()


def lose(model: Any, folder: Path, chunk: int) -> None:
    """End the replica that runs a chunk of a `mortal.Mortal`, in a forward without gradients."""
    arm(folder, f"forward {chunk}")
    with torch.no_grad():
        model(rows(2, 1))
    assert not armed(folder)


def lie(net: nn.Module) -> list[bool]:
    """Which gradients lie in the replicas."""
    return [isinstance(p.grad, RemoteGradient) and p.grad.state.untouched for p in net.parameters()]


def lie_based(net: nn.Module) -> list[bool]:
    """Which gradients have parts in the replicas."""
    return [
        isinstance(p.grad, RemoteGradient) and bool(p.grad.state.terms) for p in net.parameters()
    ]


def assert_alike(net: nn.Module, plain: nn.Module) -> None:
    """The gradients are those of a module that runs here, but for the order of additions."""
    for (name, one), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            found = one.grad.clone()
            torch.testing.assert_close(found, other.grad, rtol=1e-11, atol=1e-11, msg=name)
