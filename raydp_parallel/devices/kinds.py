"""Which devices have memory that the CPU can read directly."""

from __future__ import annotations

import torch

HOST = frozenset({"cpu"})
"""Types of devices with tensors in the machine's memory."""


def is_cpu(device: torch.device) -> bool:
    """Whether tensors of ``device`` lie in memory that other processes of the machine may share."""
    return device.type in HOST
