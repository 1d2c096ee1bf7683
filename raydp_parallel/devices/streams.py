"""Copies on a stream beside a device's computing, and the order of work on several streams.

[Note: copies beside computing]
A copy on a stream of its own begins behind an event on the stream that computed its source, and the
host waits once, for an event behind the last copy. Until then the sources are kept: memory that is
freed on one stream may be allocated again by torch before the other stream has read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.devices import trials
from raydp_parallel.devices.cuda import behind, on_device
from raydp_parallel.devices.ranges import DeviceRange, MemoryRange, is_cpu


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream | None:
    """This process's stream for copies; None if copies there do not wait for what they read."""
    stream = torch.cuda.Stream(device)
    trial = functools.partial(_carries, Courier(device, stream), device)
    return stream if trials.passes("courier", device, trial) else None


def _carries(carrier: Courier, device: torch.device) -> bool:
    """Whether copies beside the computing bring what is computed before they were asked for."""
    target = torch.empty(trials.SIZE, dtype=torch.uint8, device="cpu")
    same = True
    for number in range(trials.ROUNDS):
        carrier.carry([on_device(trials.late(number, device))], [target.data_ptr()])
        carrier.finish()
        same = same and torch.equal(target, trials.contents(number))
    return same


class Courier:
    """Copies to the machine's memory that run while the device computes.

    Args:
        device: The device.
        stream: The stream for the copies.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._begun: list[tuple[DeviceRange, MemoryRange]] = []

    def carry(self, pieces: Sequence[MemoryRange], addresses: Sequence[int]) -> None:
        """Begin to copy pieces to addresses, behind the work of the current stream."""
        behind(self._device).wait(self._stream)
        with torch.cuda.stream(self._stream):
            for piece, address in zip(pieces, addresses, strict=True):
                if piece.origin is None:
                    ctypes.memmove(address, piece.address, piece.size)
                    continue
                # noted before the copy begins, so that it is waited for in any case
                self._begun.append((piece.origin, piece))
                piece.origin.copy_to(address)

    def finish(self) -> None:
        """Wait for all copies. Their sources may be freed afterwards."""
        if self._begun:
            with torch.cuda.stream(self._stream):
                copied = behind(self._device)
            copied.synchronize()
            for origin, _ in self._begun:
                origin.settle()
            self._begun.clear()


def courier(device: torch.device) -> Courier | None:
    """What copies beside the computing, once a trial has shown that it does; None on a CPU, where
    nothing runs beside it.
    """
    stream = None if is_cpu(device) else _beside(device)
    return Courier(device, stream) if stream is not None else None


Track = tuple[Tensor, Any]
"""A tensor, and the stream that computed it."""


def track(tensor: Tensor) -> Track | None:
    """A tensor with the current stream, which computes it; None on a CPU."""
    if is_cpu(tensor.device):
        return None
    return tensor, torch.cuda.current_stream(tensor.device)


def follow(tracks: Iterable[Track]) -> None:
    """Let the current streams wait for those that computed some tensors, and then read these."""
    for tensor, stream in tracks:
        here = torch.cuda.current_stream(tensor.device)
        if stream != here:
            here.wait_stream(stream)
            if tensor.layout is torch.strided:
                tensor.record_stream(here)


def hand_over(tensors: Iterable[Tensor | None]) -> None:
    """Let the default streams wait for the current streams, where they differ.

    Torch's engine assumes that what a CPU node does on a GPU is done on the default stream.
    """
    for device in {t.device for t in tensors if t is not None}:
        if is_cpu(device):
            continue
        here, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if here != default:
            default.wait_stream(here)


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

    def rejoin(self, tensor: Tensor) -> None:
        """Let later work of the current stream use a tensor that was computed on this stream."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            # It may have been made there: its memory is not used again before this stream has read
            # it, whichever stream the next work aside begins behind.
            tensor.record_stream(here)


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
