"""What runs beside a device's computing, and work that goes on where another stream left it.

[Note: copies beside computing]
A copy on a stream of its own begins behind an event on the stream that computed its source, and the
host waits once, for an event behind the last of them. Until then the sources are kept: what torch's
allocator gets back on the one stream it may hand out again before the other has read it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices.cuda import behind
from raydp_parallel.devices.kinds import is_cpu
from raydp_parallel.devices.ranges import DeviceRange, MemoryRange


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """This process's stream for copies."""
    return torch.cuda.Stream(device)


class Courier:
    """Copies to the machine's memory that run while the device computes.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _beside(device)
        self._under_way: list[tuple[DeviceRange, MemoryRange]] = []

    def carry(self, pieces: Sequence[MemoryRange], addresses: Sequence[int]) -> None:
        """Begin to copy, behind what the current stream was asked for."""
        behind(self._device).wait(self._stream)
        with torch.cuda.stream(self._stream):
            for piece, address in zip(pieces, addresses, strict=True):
                if piece.origin is None:
                    ctypes.memmove(address, piece.address, piece.size)
                    continue
                # before it begins, so that it is waited for at any rate
                self._under_way.append((piece.origin, piece))
                piece.origin.copy_to(address)

    def finish(self) -> None:
        """Wait until all of it is there. What it was copied from may be given back then."""
        if self._under_way:
            with torch.cuda.stream(self._stream):
                copied = behind(self._device)
            copied.synchronize()
            for origin, _ in self._under_way:
                origin.settle()
            self._under_way.clear()


def courier(device: torch.device) -> Courier | None:
    """Who copies beside the computing; None on a CPU, which does the one or the other."""
    return None if is_cpu(device) else Courier(device)


Track = tuple[Tensor, Any]
"""A tensor, and the stream that made it."""


def track(tensor: Tensor) -> Track | None:
    """Note the stream that makes a tensor just now; None on a CPU."""
    return None if is_cpu(tensor.device) else (tensor, torch.cuda.current_stream(tensor.device))


def follow(tracks: Iterable[Track]) -> None:
    """Let the current streams go on behind those that made some tensors, and read these."""
    for tensor, stream in tracks:
        here = torch.cuda.current_stream(tensor.device)
        if stream != here:
            here.wait_stream(stream)
            if tensor.layout is torch.strided:
                tensor.record_stream(here)


def hand_over(tensors: Iterable[Tensor | None]) -> None:
    """Let the default streams go on behind the current ones, where those are others.

    Torch's engine takes it that what a node of the CPU does on a GPU is done on the default stream.
    """
    for device in {t.device for t in tensors if t is not None and not is_cpu(t.device)}:
        here, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if here != default:
            default.wait_stream(here)
