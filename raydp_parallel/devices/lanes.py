"""CUDA streams for sums among replicas. On a CPU these classes do nothing, because everything runs
in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices.ranges import is_cpu


class Lane:
    """A CUDA stream of its own, beside the device's current stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if is_cpu(device) else torch.cuda.Stream(device)

    @contextlib.contextmanager
    def taken(self, tensor: Tensor) -> Iterator[None]:
        """Compute on this stream, behind the current stream's work, with a tensor made there."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # If the tensor is freed, its memory is not used again before this stream has read it.
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let later work of the current stream wait for what was computed on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Makers:
    """The streams on which some tensors were computed: a module may use several.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[Any] = set()

    def note(self) -> None:
        """Record the current stream, on which a tensor was just computed."""
        if not is_cpu(self._device):
            self._streams.add(torch.cuda.current_stream(self._device))

    def catch_up(self) -> None:
        """Let later work of the current stream wait for all recorded streams."""
        if self._streams:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
