"""Which devices have memory that the CPU reads where it lies."""

from __future__ import annotations

import torch

HOST = frozenset({"cpu"})
"""Types of devices whose tensors lie in the machine's memory."""


def is_cpu(device: torch.device) -> bool:
    """Whether tensors of ``device`` lie in memory that other processes of the machine may share."""
    return device.type in HOST
