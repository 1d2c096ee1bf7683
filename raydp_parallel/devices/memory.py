"""Bytes between a window, which lies on the host, and the device that computes.

On a GPU a row of tensors is gathered there first, so that it takes one copy down and one copy up,
through pinned memory both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_pinned: dict[tuple[torch.device, str], Tensor] = {}


def _staging(device: torch.device, way: str, size: int) -> Tensor:
    """Return pinned memory that is kept for one device and way."""
    found = _pinned.get((device, way))
    if found is None or found.numel() < size:
        found = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=True)
        _pinned[device, way] = found
    return found[:size]


def download(tensors: list[Tensor], layout: Any, window: Any) -> None:
    """Copy a row of tensors, from wherever they lie, into a window."""
    views = window.views(layout)
    devices = {t.device for t in tensors}
    if devices == {torch.device("cpu")}:
        torch._foreach_copy_(views, tensors)
        return
    for device in devices:
        mine = [i for i, t in enumerate(tensors) if t.device == device]
        if device.type == "cpu":
            torch._foreach_copy_([views[i] for i in mine], [tensors[i] for i in mine])
            continue
        flat = torch.empty(layout.size, dtype=torch.uint8, device=device)
        there = layout.views(flat)
        torch._foreach_copy_([there[i] for i in mine], [tensors[i] for i in mine])
        host = _staging(device, "down", layout.size)
        host.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        here = layout.views(host)
        torch._foreach_copy_([views[i] for i in mine], [here[i] for i in mine])


def upload(layout: Any, window: Any, device: torch.device) -> list[Tensor]:
    """Give the tensors of a window on a device: on a CPU where they lie."""
    if device.type == "cpu":
        found = [*window.views(layout)]
    else:
        host = _staging(device, "up", layout.size)
        torch.cuda.current_stream(device).synchronize()  # the last copy out of the staging
        host.copy_(window.memory[: layout.size])
        found = layout.views(host.to(device, non_blocking=True))
    for i, spec in enumerate(layout.specs):
        if spec.grad:  # the window's own views are used again
            found[i] = found[i].detach().requires_grad_()
    return found
