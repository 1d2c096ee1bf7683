"""What a process sets before it computes: seeds, threads, and that it keeps memory."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch

from raydp_parallel.devices.kinds import is_cpu

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 29

_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed everything random that a forward may use, as a function of the call and the chunk alone (row A10)."""
    value = (call_seed + chunk * _GOLDEN) & _SEED_BITS
    torch.default_generator.manual_seed(value)
    if not is_cpu(device):
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def use_threads(device: torch.device, count: int | None) -> None:
    """Compute with so many threads from now on, on a CPU."""
    if count is not None and is_cpu(device) and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Let this process keep memory that it freed, up to a limit, instead of giving it back and asking for new pages."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
