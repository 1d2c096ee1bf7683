"""Runs of bytes: their place in memory, and copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 64
PAGE = 4096
_LARGE = 1 << 16
"""Bytes from which a run of memory begins on a page, so that it can be mapped."""

Attachment = Any
"""What a link makes of some bytes: bytes, which lie in the message, or an object beside it."""


class DeviceRange(Protocol):
    """Memory of a device, which the CPU cannot read."""

    @property
    def tensor(self) -> Any:
        """The bytes, as a tensor of the device."""

    @property
    def device(self) -> Any:
        """The device. Copies of one device finish in order, those of two devices do not."""

    def part(self, offset: int, size: int) -> DeviceRange:
        """A part of the bytes."""

    def copy_to(self, address: int) -> None:
        """Begin to copy the bytes to the CPU's memory."""

    def wait(self) -> None:
        """Wait for the copies that this and earlier `copy_to` calls of the device began."""

    def settle(self) -> None:
        """After `wait`: finish copies that went through other memory."""


class MemoryRange(NamedTuple):
    """A run of bytes.

    Attributes:
        address: The first byte's address in the CPU's memory; 0 if it lies on a device.
        size: The number of bytes.
        owner: The object that keeps the memory alive.
        origin: The memory of the device that it lies on, None for the CPU's memory.
    """

    address: int
    size: int
    owner: Any
    origin: DeviceRange | None = None

    def part(self, offset: int, size: int) -> MemoryRange:
        """A part of the bytes."""
        if self.origin is not None:
            return MemoryRange(0, size, self.owner, self.origin.part(offset, size))
        return MemoryRange(self.address + offset, size, self.owner)


def address_of(packet: bytes) -> int:
    """The address of a bytes object's contents, valid as long as the object lives."""
    return ctypes.c_void_p.from_buffer(ctypes.c_char_p(packet)).value or 0


def in_bytes(packet: bytes) -> MemoryRange:
    """The memory range of a bytes object, which the range keeps alive."""
    return MemoryRange(address_of(packet), len(packet), packet)


def aligned(size: int) -> int:
    """``size`` rounded up so that what follows is aligned for every dtype."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def paged(offset: int, size: int) -> int:
    """The first offset, from ``offset`` on, for ``size`` bytes: large runs begin on a page, so that
    they can be mapped.
    """
    if size < _LARGE:
        return offset
    return -(-offset // PAGE) * PAGE


def fill(address: int, pieces: Sequence[MemoryRange], offsets: Sequence[int]) -> None:
    """Copy the pieces to their offsets from ``address``."""
    on_devices: list[DeviceRange] = []
    for piece, offset in zip(pieces, offsets, strict=True):
        if piece.origin is None:
            ctypes.memmove(address + offset, piece.address, piece.size)
        elif piece.size:
            piece.origin.copy_to(address + offset)
            on_devices.append(piece.origin)
    last_of_device = {origin.device: origin for origin in on_devices}
    for origin in last_of_device.values():
        origin.wait()
    for origin in on_devices:
        origin.settle()
