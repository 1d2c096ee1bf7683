"""A stream for sums among replicas, and those that made what is summed. On a CPU everything is in
order anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices.kinds import is_cpu


class Lane:
    """A stream of one's own.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if is_cpu(device) else torch.cuda.Stream(device)

    @contextlib.contextmanager
    def taken(self, tensor: Tensor) -> Iterator[None]:
        """Compute there, behind what was asked for so far, with a tensor that is there now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # freed while this stream may still use it, it is nobody else's before
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let what is asked for from now on come behind what was computed there."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Makers:
    """The streams on which some tensors were made: a module may use several.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[Any] = set()

    def note(self) -> None:
        """One was made just now, on the current stream."""
        if not is_cpu(self._device):
            self._streams.add(torch.cuda.current_stream(self._device))

    def catch_up(self) -> None:
        """Let what is asked for from now on come behind all of them."""
        if self._streams:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
